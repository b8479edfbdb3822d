#include <roundpipe/quantise/folder_tensors.h>

#include <algorithm>

#include <roundpipe/files/json_text.h>

namespace roundpipe::quantise {

namespace {

// Beyond 2^48 numbers no weight is, and products of sizes do not overflow.
constexpr int64_t kMostNumbers = int64_t{1} << 48;

}  // namespace

FolderTensors::FolderTensors(const std::vector<files::TensorEntry>& tensors, const ReadTensor& read) : read_(read) {
  for (const files::TensorEntry& tensor : tensors) tensors_.emplace(tensor.name, tensor);
}

const files::TensorEntry& FolderTensors::at(const std::string& name, const std::string& of,
                                            const std::vector<std::string>& dtypes) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    refuse_stored(of, "lacks ", name, ", expected it beside the codes; download the model again");
  }
  if (std::ranges::find(dtypes, found->second.dtype) == dtypes.end()) {
    std::string expected;
    for (const std::string& dtype : dtypes) expected += (expected.empty() ? "" : " or ") + dtype;
    refuse_stored(name, "has the dtype ", found->second.dtype, ", expected ", expected);
  }
  return found->second;
}

const files::TensorEntry& FolderTensors::at(const std::string& name, const std::string& of,
                                            const std::vector<std::string>& dtypes, int64_t count) const {
  const files::TensorEntry& found = at(name, of, dtypes);
  const int64_t numbers = c10::multiply_integers(found.shape);
  if (numbers != count) refuse_stored(name, "has ", numbers, " numbers, expected ", count, " for the shape of ", of);
  return found;
}

void require_form(const Format& format, const std::string& name, at::IntArrayRef sizes) {
  if (const std::string reason = format.reason_against(sizes); !reason.empty()) refuse_stored(name, reason);
}

std::vector<int64_t> sizes_in(const nlohmann::json& list, const std::string& where) {
  std::vector<int64_t> sizes;
  if (!list.is_array()) refuse_stored(where, "is no list, expected the sizes of a weight");
  int64_t numbers = 1;
  for (const nlohmann::json& size : list) {
    sizes.push_back(files::count(size, "size", place(where)));
    numbers = sizes.back() > kMostNumbers / std::max<int64_t>(numbers, 1) ? kMostNumbers + 1 : numbers * sizes.back();
    if (numbers > kMostNumbers) refuse_stored(where, "is too large, expected at most 2^48 numbers");
  }
  return sizes;
}

}  // namespace roundpipe::quantise
