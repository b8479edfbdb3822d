#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/folder_tensors.h>
#include <roundpipe/quantise/stored_weight.h>

// Private to this level's sources.
namespace roundpipe::quantise {

// Of config.json.
inline constexpr const char* kConfig = "quantization_config";

// A published way to store encoded weights.
struct FolderLayout {
  const char* method;                // quant_method
  std::vector<std::string> formats;  // that are written so
  StoredWeights (*find)(const nlohmann::json& config, const FolderTensors& tensors);
  // For those formats.
  std::vector<std::pair<std::string, at::Tensor>> (*store)(const std::string& name, const EncodedTensor& weight);
  // The rest of quantization_config.
  nlohmann::ordered_json (*config)(const Format& format, c10::ScalarType dtype, const std::vector<std::string>& kept);
};

FolderLayout bitsandbytes_layout();
FolderLayout mxfp4_layout();
FolderLayout compressed_layout();
FolderLayout fp8_layout();

}  // namespace roundpipe::quantise
