#include <roundpipe/device/device.h>

namespace roundpipe::device {

EventPtr Queue::mark() {
  EventPtr event = make_event();
  signal(event);
  return event;
}

}  // namespace roundpipe::device
