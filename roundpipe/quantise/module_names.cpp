#include <roundpipe/quantise/module_names.h>

#include <string>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

bool is_name_of(std::string_view name, std::string_view path) {
  return !name.empty() && concat(".", path, ".").find(concat(".", name, ".")) != std::string::npos;
}

}  // namespace roundpipe::quantise
