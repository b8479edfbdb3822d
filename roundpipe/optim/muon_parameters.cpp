#include <roundpipe/optim/muon_parameters.h>

#include <algorithm>
#include <array>

#include <roundpipe/optim/weight_decay.h>

namespace roundpipe::optim {

namespace {

// Of Mamba, the logarithms of decays: a matrix that multiplies nothing.
constexpr std::array<std::string_view, 7> kOthers = {"wte",   "wpe",        "lm_head", "output_layer",
                                                     "score", "classifier", "A_log"};

bool is_embedding(std::string_view name) { return name.ends_with("Embedding") || name.ends_with("EmbeddingImpl"); }

}  // namespace

bool is_for_muon(std::string_view name, at::IntArrayRef sizes, std::span<const std::string> classes) {
  if (!has_weight_decay(name, classes)) return false;
  if (std::ranges::any_of(classes, [](const std::string& each) { return is_embedding(each); })) return false;
  bool is_of_experts = false;
  for (size_t from = 0; from <= name.size();) {
    const size_t end = std::min(name.find('.', from), name.size());
    const std::string_view part = name.substr(from, end - from);
    if (part.find("embed") != std::string_view::npos || std::ranges::find(kOthers, part) != kOthers.end()) return false;
    is_of_experts |= part == "experts";
    from = end + 1;
  }
  return sizes.size() == 2 || (sizes.size() == 3 && is_of_experts);
}

}  // namespace roundpipe::optim
