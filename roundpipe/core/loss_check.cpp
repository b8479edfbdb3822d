#include <roundpipe/core/loss_check.h>

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <roundpipe/core/error.h>

namespace roundpipe {

bool checks_losses() {
  const char* const value = std::getenv("ROUNDPIPE_CHECK_LOSS");
  if (value == nullptr || std::string_view(value) == "1") return true;
  if (std::string_view(value) == "0") return false;
  throw std::invalid_argument(
      concat("[ROUNDPIPE_CHECK_LOSS] the variable is '", value, "', expected 0 (a NaN loss is no error) or 1"));
}

}  // namespace roundpipe
