#include <roundpipe/language/experts.h>

#include <string_view>

#include <roundpipe/core/error.h>

namespace roundpipe::language {

namespace {

constexpr std::string_view kGateUp = "gate_up_proj";
constexpr std::string_view kDown = "down_proj";
constexpr std::string_view kExperts = "mlp.experts.";

// What `name` begins with, up to the matrix; empty for no stacked matrix.
std::string before_matrix(const std::string& name) {
  for (const std::string_view matrix : {kGateUp, kDown}) {
    if (name.ends_with(std::string(kExperts) + std::string(matrix))) return name.substr(0, name.size() - matrix.size());
  }
  return "";
}

std::string matrix_name(const std::string& before, int64_t expert, const char* matrix) {
  return concat(before, expert, ".", matrix, ".weight");
}

}  // namespace

std::vector<WeightShape> one_by_one(const std::vector<WeightShape>& stacked) {
  std::vector<WeightShape> all;
  for (const WeightShape& weight : stacked) {
    const std::string before = before_matrix(weight.name);
    if (before.empty()) {
      all.push_back(weight);
      continue;
    }
    for (int64_t expert = 0; expert < weight.shape[0]; ++expert) {
      if (weight.name.ends_with(kGateUp)) {
        const std::vector<int64_t> half{weight.shape[1] / 2, weight.shape[2]};
        all.push_back({matrix_name(before, expert, "gate_proj"), half});
        all.push_back({matrix_name(before, expert, "up_proj"), half});
      } else {
        all.push_back({matrix_name(before, expert, "down_proj"), {weight.shape[1], weight.shape[2]}});
      }
    }
  }
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> one_by_one(
    const std::vector<std::pair<std::string, at::Tensor>>& stacked) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& [name, given] : stacked) {
    const std::string before = before_matrix(name);
    const at::Tensor tensor = given.detach();
    if (before.empty()) {
      all.emplace_back(name, given);
      continue;
    }
    for (int64_t expert = 0; expert < tensor.size(0); ++expert) {
      const at::Tensor own = tensor.select(0, expert);
      if (name.ends_with(kGateUp)) {
        const int64_t inner = own.size(0) / 2;
        all.emplace_back(matrix_name(before, expert, "gate_proj"), own.narrow(0, 0, inner));
        all.emplace_back(matrix_name(before, expert, "up_proj"), own.narrow(0, inner, inner));
      } else {
        all.emplace_back(matrix_name(before, expert, "down_proj"), own);
      }
    }
  }
  return all;
}

}  // namespace roundpipe::language
