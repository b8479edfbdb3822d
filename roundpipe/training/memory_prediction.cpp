#include <roundpipe/training/memory_prediction.h>

#include <algorithm>

#include <roundpipe/core/error.h>
#include <roundpipe/training/host_memory.h>

namespace roundpipe {

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
