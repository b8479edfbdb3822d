#include <roundpipe/core/number_text.h>

#include <array>
#include <charconv>
#include <cmath>

namespace roundpipe {

std::string number_text(double number) {
  if (std::isnan(number)) return "nan";  // without a sign
  std::array<char, 32> text;             // no double needs more than 24
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

}  // namespace roundpipe
