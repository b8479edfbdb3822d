#include <roundpipe/quantise/module_names.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

bool is_name_of(std::string_view name, std::string_view path) {
  return !name.empty() && concat(".", path, ".").find(concat(".", name, ".")) != std::string::npos;
}

void require_modules(const std::vector<std::string>& names, const std::vector<std::string>& paths) {
  for (const std::string& name : names) {
    if (std::ranges::any_of(paths, [&](const std::string& path) { return is_name_of(name, path); })) continue;
    throw std::invalid_argument(concat("[quantise] keep names '", name,
                                       "', which is no module of the model, expected such as 'down_proj' or "
                                       "'model.layers.0.self_attn.q_proj'"));
  }
}

}  // namespace roundpipe::quantise
