#pragma once

#include <string_view>

namespace roundpipe::quantise {

// Whether `name` is the path of a module, or of one around it, or the last part or parts of such a path: "down_proj",
// "layers.0" and "model.layers.0.mlp" are names of "model.layers.0.mlp.down_proj".
bool is_name_of(std::string_view name, std::string_view path);

}  // namespace roundpipe::quantise
