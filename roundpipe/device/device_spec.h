#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/device/fault.h>

namespace roundpipe::device {

// One worker's device, as the user requested it.
struct DeviceSpec {
  bool is_virtual = true;
  std::string type = "virtual";      // "virtual", or torch's name for the accelerator: "cuda", "npu", "xpu"
  int index = 0;                     // ordinal of the accelerator, or among all virtual devices
  int replica = 0;                   // 0, 1, ... for the workers that share a card
  int64_t memory_bytes = 0;          // cap; 0 = none for virtual devices, the free memory for accelerators
  double link_gb_per_s = 0;          // each direction of each device; 0 = not throttled
  double host_gb_per_s = 0;          // shared by all links, set by the first device; 0 = not throttled
  double latency_ms = 0;             // of each copy over a link
  int64_t chunk_bytes = 64'000'000;  // of a transfer; 0 = not cut
  bool first_come = false;           // transfers run in the order of their requests; for comparison
  int threads = 0;                   // intra-op threads of its layers; 0 = as many as the process uses
  bool debug = false;                // fill freed device memory with NaN
  double watchdog_ms = 0;            // the longest time for one microbatch or copy; 0 = no limit
  int64_t resident_bytes = -1;       // of frozen weights that stay there, at most; below 0 = as many as find room
  std::vector<Fault> faults;         // of virtual devices

  std::string name() const;  // "virtual:0", "cuda:1", "cuda:0.2"
};

// Grammar: groups of devices, each followed by its options, separated by commas.
//   virtual:N | TYPE:I | TYPE:IxN  (N workers that share card I)
//   memory=2GiB  chunk=64MB  fifo  watchdog=30s  resident=0
//   virtual devices only: link=8GB/s  host=20GB/s  latency=0.5ms  threads=1  debug
//                         fail=error@30  fail=2:slow@30+5ms  (see Fault; 2: only device virtual:2 of the group)
// Without `:...`, "virtual" is one virtual device and TYPE is card 0. An option applies to the device group before it.
// Throws std::invalid_argument for anything else, for devices of different types and for a device named twice.
std::vector<DeviceSpec> parse_devices(std::string_view text);

}  // namespace roundpipe::device
