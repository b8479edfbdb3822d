#include <roundpipe/training/memory_prediction.h>

#include <algorithm>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe {

MemoryRows rows_of(const HostPrediction& host) {
  return {{"weights", host.weights},
          {"gradients", host.gradients},
          {"partial sums of gradients", host.partial_sums},
          {"fp32 masters", host.masters},
          {"moments", host.moments},
          {"values between stages", host.values},
          {"kept for failures", host.kept_for_failures}};
}

MemoryRows rows_of(const simulate::DeviceMemory& device) {
  return {{"weights", device.weights},
          {"gradients", device.gradients},
          {"values", device.values},
          {"work", device.work},
          {"resident", device.resident}};
}

std::string memory_table(const std::string& title, const MemoryRows& rows, const MemoryRows& beside) {
  MemoryRows shown;
  int64_t together = 0;
  for (const auto& row : rows) {
    together += row.second;
    if (row.second != 0) shown.push_back(row);
  }
  shown.emplace_back("together", together);
  shown.insert(shown.end(), beside.begin(), beside.end());
  size_t width = 0;
  for (const auto& [name, bytes] : shown) width = std::max(width, name.size());
  std::string text = title;
  for (const auto& [name, bytes] : shown) {
    const std::string size = format_bytes(bytes);
    text += concat("\n  ", name, std::string(width - name.size(), ' '), " ",
                   std::string(size.size() < 12 ? 12 - size.size() : 0, ' '), size);
  }
  return text;
}

std::string MemoryPrediction::text() const {
  const auto count = [&](Activations place) { return std::ranges::count(activations, place); };
  MemoryRows beside;
  if (measured_bytes && *measured_bytes > 0) beside = {{"measured so far", *measured_bytes}};
  return concat(memory_table("on the fullest device:", rows_of(device), beside), "\n",
                memory_table("on the host:", rows_of(host), {}), "\nactivations: ", count(Activations::kDevice),
                " layers keep them, ", count(Activations::kHost), " are recomputed from inputs on the host, ",
                count(Activations::kRecompute), " from a layer below");
}

}  // namespace roundpipe
