#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/files/safetensors.h>
#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/stored_weight.h>

namespace roundpipe::quantise {

// The encoded weights in files with these tensors, of which `read` returns a small one on the host. `config` is the
// text of the quantization_config in the model's config.json. Known are
// - bitsandbytes' 4 bits, NF4 with blocks of 64 numbers, with and without nested scales, as transformers serialises it
//   (docs of bitsandbytes, "4-bit quantization"; transformers, "bitsandbytes");
// - MXFP4 as OpenAI published GPT-OSS: X_blocks and X_scales, of transposed matrices;
// - compressed-tensors' whole numbers of 8 bits with a scale for each row ("int-quantized", "pack-quantized") and of 4
//   bits also with one for 32, 64 or 128 of them, and E4M3 numbers with one for each row or tensor ("float-quantized"),
//   without zero points and without quantised activations;
// - E4M3 numbers with a scale for each block of rows and 128 columns, or for each tensor, as DeepSeek and Qwen publish
//   them (transformers, "fine-grained FP8"); their activations are not rounded, as with transformers' `dequantize`.
// Throws std::invalid_argument, naming the method or tensor, for everything else, also if a tensor is missing, damaged
// or of another shape.
StoredWeights find_stored_weights(std::string_view config, const std::vector<files::TensorEntry>& tensors,
                                  const std::function<at::Tensor(const std::string& name)>& read);

// The tensors that hold an encoded weight in such files, by their names: NF4 as bitsandbytes stores it, MXFP4 as
// GPT-OSS does, and rows of 8 bits as compressed-tensors does ("int-quantized"). On the meta device without values.
std::vector<std::pair<std::string, at::Tensor>> stored_tensors(const std::string& name, const EncodedTensor& weight);
// The text of the quantization_config of such files. `kept`: their linear layers whose weights are not encoded.
std::string stored_config(const Format& format, c10::ScalarType dtype, const std::vector<std::string>& kept);

}  // namespace roundpipe::quantise
