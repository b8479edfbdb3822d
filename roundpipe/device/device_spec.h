#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace roundpipe::device {

// One worker device as the user asked for it.
struct DeviceSpec {
  bool is_virtual = true;
  std::string type = "virtual";      // "virtual", or torch's name of the accelerator: "cuda", "npu", "xpu"
  int index = 0;                     // ordinal of the accelerator; of the virtual device within its group
  int replica = 0;                   // of several workers on one card: 0, 1, ...
  int64_t memory_bytes = 0;          // cap; 0 = none for virtual devices, what is free on the card for accelerators
  double link_gb_per_s = 0;          // each direction of each device; 0 = not throttled
  double host_gb_per_s = 0;          // shared by all links; 0 = not throttled
  double latency_ms = 0;             // of each copy over a link
  int64_t chunk_bytes = 64'000'000;  // of a transfer; 0 = moved whole
  bool first_come = false;           // transfers in the order in which they are asked for; to compare with
  int threads = 0;                   // intra-op threads of its layers; 0 = as many as the process uses
  bool debug = false;                // fill freed device memory with NaN

  std::string name() const;  // "virtual:0", "cuda:1", "cuda:0.2"
};

// Grammar, comma separated: groups, each followed by its options.
//   virtual:N | TYPE:I | TYPE:IxN  (N workers that share card I)
//   memory=2GiB  chunk=64MB  fifo; virtual devices only: link=8GB/s  host=20GB/s  latency=0.5ms  threads=1  debug
// An option before the first group is refused; one after a group holds for that group.
// Throws std::invalid_argument for anything else.
std::vector<DeviceSpec> parse_devices(std::string_view text);

}  // namespace roundpipe::device
