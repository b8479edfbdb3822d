#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// A direction of a device's link.
enum class LinkWay { kUp, kDown };  // host to device, device to host

// The rates of one device's link in 1e9 bytes per second; 0 = not measured.
struct LinkRates {
  double up_gb_per_s = 0;
  double down_gb_per_s = 0;
};

// What a pool's links have shown so far.
struct MachineRates {
  std::vector<LinkRates> links;  // of each device
  double host_gb_per_s = 0;      // of all links together; 0 = they have not been seen to slow each other
  double hop_latency_ms = 0;     // that a small value takes down and up again; 0 = not measured

  // Of the slowest measured link, since a plan may use any; 0 = none is measured.
  double up_gb_per_s() const { return slowest(&LinkRates::up_gb_per_s); }
  double down_gb_per_s() const { return slowest(&LinkRates::down_gb_per_s); }

 private:
  double slowest(double LinkRates::* rate) const;
};

// The time during which a chunk alone occupied its link, in Clock milliseconds.
struct BusyChunk {
  std::size_t link;
  double start_ms, end_ms;
  double bytes;
  double rate() const { return bytes / (end_ms - start_ms); }  // bytes per millisecond
};

// Learns the bandwidths of a pool's links from the transfers that its calls make anyway, so nothing is moved to
// measure.
//
// A link's rate is the best that it has sustained lately: bytes over time of a busy stretch, which ends when the link
// has nothing to do. Stretches of less than kStretch_bytes do not count: late wake-ups and fixed costs would show, most
// of all on a busy machine. A stretch during which other links are busy may be slowed by the host, so the second-best
// of the last kStretches counts: one good reading is not enough to raise a rate, and many slow ones do not lower it
// until they fill the list.
//
// The host's rate is the best that several links have sustained together, if they were busy together with rates of
// their own that add up to more; else the host is not a limit.
// Thread safety: any thread.
class MachineMeter {
 public:
  static constexpr double kStretch_bytes = 1e6;
  static constexpr std::size_t kStretches = 32;

  explicit MachineMeter(int devices);

  // The observer of one link. It may outlive the meter.
  std::shared_ptr<transfer::LinkObserver> link(int device, LinkWay way) const;
  MachineRates rates() const;

 private:
  class Link;
  struct Log;
  const std::shared_ptr<Log> log_;
  std::vector<std::shared_ptr<Link>> links_;  // up, down of each device
};

}  // namespace roundpipe::runtime
