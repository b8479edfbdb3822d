#pragma once

#include <string>

namespace roundpipe {

// The shortest text that is this number: "0.1", "1e-05", "nan".
std::string number_text(double number);

}  // namespace roundpipe
