#include <roundpipe/device/device.h>

#include <stdexcept>

namespace roundpipe::device {

EventPtr Queue::mark() {
  EventPtr event = make_event();
  signal(event);
  return event;
}

void Device::inject(const Fault& /*fault*/) {
  throw std::invalid_argument(
      concat("[devices] ", name_, " is a real device, expected a virtual one: faults are injected into those only"));
}

}  // namespace roundpipe::device
