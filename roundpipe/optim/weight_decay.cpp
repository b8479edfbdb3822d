#include <roundpipe/optim/weight_decay.h>

#include <algorithm>
#include <array>

namespace roundpipe::optim {

namespace {

char lowered(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter; }

bool names_bias_or_norm(std::string_view part) { return part == "norm" || part.ends_with("_norm") || part == "sinks"; }

// "Norm", then what the classes of torch, libtorch and transformers have behind it.
bool is_norm(std::string_view name) {
  constexpr std::array<std::string_view, 6> kEnds = {"", "1d", "2d", "3d", "Gated", "Impl"};
  for (const std::string_view end : kEnds) {
    if (!name.ends_with(end)) continue;
    std::string_view rest = name;
    rest.remove_suffix(end.size());
    if (rest.ends_with("Norm")) return true;
    // libtorch: BatchNorm2dImpl
    if (end == "Impl" && is_norm(rest)) return true;
  }
  return false;
}

}  // namespace

bool has_weight_decay(std::string_view name, std::span<const std::string> classes) {
  if (std::ranges::any_of(classes, [](const std::string& each) { return is_norm(each); })) return false;
  std::string low(name);
  std::ranges::transform(low, low.begin(), lowered);
  for (const char* const anywhere : {"bias", "layernorm", "rmsnorm"}) {
    if (low.find(anywhere) != std::string::npos) return false;
  }
  for (size_t from = 0; from <= low.size();) {
    const size_t end = std::min(low.find('.', from), low.size());
    if (names_bias_or_norm(std::string_view(low).substr(from, end - from))) return false;
    from = end + 1;
  }
  return true;
}

}  // namespace roundpipe::optim
