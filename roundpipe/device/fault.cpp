#include <roundpipe/device/fault.h>

#include <charconv>
#include <stdexcept>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::device {

Fault parse_fault(std::string_view text) {
  const auto refuse = [text] {
    throw std::invalid_argument(concat("[devices] '", text,
                                       "' is not a fault; write for example error@30, hang@30, bits@30 or "
                                       "slow@30+5ms: what happens, and at which microbatch, counted from 1"));
  };
  const size_t at_sign = text.find('@');
  if (at_sign == std::string_view::npos) refuse();
  const std::string_view kind = text.substr(0, at_sign);
  std::string_view number = text.substr(at_sign + 1);
  Fault fault;
  if (kind == "slow") {
    const size_t plus = number.find('+');
    if (plus == std::string_view::npos) refuse();
    fault.kind = Fault::Kind::kSlow;
    fault.slow_ms = parse_duration_ms(number.substr(plus + 1), "devices");
    number = number.substr(0, plus);
  } else if (kind == "error") {
    fault.kind = Fault::Kind::kError;
  } else if (kind == "hang") {
    fault.kind = Fault::Kind::kHang;
  } else if (kind == "bits") {
    fault.kind = Fault::Kind::kBits;
  } else {
    refuse();
  }
  const char* const last = number.data() + number.size();
  const auto [end, error] = std::from_chars(number.data(), last, fault.at);
  if (error != std::errc{} || end != last || fault.at < 1) refuse();
  return fault;
}

}  // namespace roundpipe::device
