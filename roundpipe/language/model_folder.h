#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/files/file_system.h>
#include <roundpipe/language/options.h>

namespace roundpipe::language {

// Makes what is written of a weight: of the same shape and dtype, held only while it is written.
using WrittenValue = std::function<at::Tensor(const std::string& name, const at::Tensor& weight)>;

// Writes a folder that transformers' from_pretrained loads: the weights as safetensors, in one file or in several with
// an index; the config.json of the folder `source`, with the dtype of the first weight; and the tokenizer's files and
// generation_config.json of that folder. Everything is written into a hidden folder beside it, and renamed when it is
// complete and on the disk, so a folder of this name is whole or not there.
// Throws std::invalid_argument if something is at `folder` and `replace` is not set, and
// Error when the disk refuses. REQUIRES: `weights` are host tensors with distinct names. `written`: none writes the
// weights themselves.
void write_model_folder(const std::string& folder, const std::string& source,
                        const std::vector<std::pair<std::string, at::Tensor>>& weights,
                        const ModelFolderOptions& options = {}, const WrittenValue& written = {},
                        files::FileSystem& files = files::FileSystem::real());

// Writes a folder by `write`, which is given a hidden folder beside it; see write_model_folder for the rest.
void write_whole_folder(const std::string& folder, bool replace,
                        const std::function<void(const std::string& hidden)>& write,
                        files::FileSystem& files = files::FileSystem::real());

// Writes one safetensors file of host tensors, for transformers and PEFT.
void write_weights(const std::string& folder, const std::string& name,
                   const std::vector<std::pair<std::string, at::Tensor>>& weights, const WrittenValue& written = {},
                   files::FileSystem& files = files::FileSystem::real());
// Writes a small file.
void write_text(const std::string& folder, const std::string& name, const std::string& text,
                files::FileSystem& files = files::FileSystem::real());

// Throws std::invalid_argument if write_model_folder would refuse to write there.
void check_model_folder(const std::string& folder, bool replace, files::FileSystem& files = files::FileSystem::real());

}  // namespace roundpipe::language
