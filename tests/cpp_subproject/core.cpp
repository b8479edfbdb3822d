// A second source of the application that includes everything.
#include <roundpipe/roundpipe.h>

namespace application {

double first_rate() { return roundpipe::warmup_rate(4)(0); }

}  // namespace application
