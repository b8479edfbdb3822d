#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace roundpipe::quantise {

// Whether `name` is the path of a module, or of one around it, or the last part or parts of such a path: "down_proj",
// "layers.0" and "model.layers.0.mlp" are names of "model.layers.0.mlp.down_proj".
bool is_name_of(std::string_view name, std::string_view path);

// Throws std::invalid_argument unless each of the names, which a user wants to keep as they are, is one of a path.
void require_modules(const std::vector<std::string>& names, const std::vector<std::string>& paths);

}  // namespace roundpipe::quantise
