#include <roundpipe/quantise/module_names.h>

#include <string>

namespace roundpipe::quantise {

bool is_name_of(std::string_view name, std::string_view path) {
  return !name.empty() && ("." + std::string(path) + ".").find("." + std::string(name) + ".") != std::string::npos;
}

}  // namespace roundpipe::quantise
