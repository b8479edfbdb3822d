#include <roundpipe/runtime/machine_meter.h>

#include <algorithm>
#include <functional>
#include <limits>

namespace roundpipe::runtime {

struct MachineMeter::Log {
  Mutex mutex;
  std::deque<BusyChunk> chunks ROUNDPIPE_GUARDED_BY(mutex);  // of all links, in the order of their arrival
};

namespace {

constexpr double kGigabytePerSecond = 1e6;  // bytes per millisecond
// A pause of a link that is shorter is the time between two requests of one backlog.
constexpr double kPause_ms = 0.5;
// A stretch is cut here, so that a link that never rests shows its rate, too.
constexpr double kLongest_ms = 50;
constexpr std::size_t kChunks = 2048;           // of all links, to see what they reach together
constexpr std::int64_t kSmall_bytes = 1 << 16;  // a transfer of which the fixed costs are nearly all
constexpr std::size_t kSmallOnes = 64;
// The host limits the links if together they stay below this share of what they reach one by one.
constexpr double kOwnShare = 0.9;

// The second-best value, or the only one; 0 without any.
double second_best(std::vector<double> values) {
  if (values.empty()) return 0;
  const std::size_t place = std::min<std::size_t>(1, values.size() - 1);
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(place), std::greater<>());
  return values[place];
}

double middle_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

// What several links have done together, while the same ones were busy or from one to the next.
struct Together {
  double start_ms, end_ms;
  double bytes = 0;      // that passed
  double own_bytes = 0;  // that would have passed at the links' own rates

  double rate() const { return bytes / (end_ms - start_ms); }
  double own_rate() const { return own_bytes / (end_ms - start_ms); }
};

// The stretches of time in which at least two links were busy. `own`: the rate of each, bytes per millisecond.
std::vector<Together> stretches_together(const std::deque<BusyChunk>& chunks, const std::vector<double>& own) {
  struct Edge {
    double ms;
    const BusyChunk* chunk;
    bool begins;
  };
  std::vector<Edge> edges;
  for (const BusyChunk& chunk : chunks) {
    // Small ones take their fixed costs, whatever the host does.
    if (chunk.bytes <= own[chunk.link] * kPause_ms || chunk.end_ms <= chunk.start_ms) continue;
    edges.push_back({chunk.start_ms, &chunk, true});
    edges.push_back({chunk.end_ms, &chunk, false});
  }
  std::ranges::stable_sort(edges, {}, &Edge::ms);
  std::vector<Together> stretches;
  std::vector<const BusyChunk*> busy;
  for (std::size_t i = 0; i < edges.size(); ++i) {
    if (edges[i].begins) {
      busy.push_back(edges[i].chunk);
    } else {
      std::erase(busy, edges[i].chunk);
    }
    if (i + 1 == edges.size() || busy.size() < 2) continue;
    const double from_ms = edges[i].ms, to_ms = edges[i + 1].ms;
    const bool follows = !stretches.empty() && from_ms - stretches.back().end_ms < kPause_ms &&
                         stretches.back().end_ms - stretches.back().start_ms < kLongest_ms;
    if (!follows) stretches.push_back({from_ms, from_ms});
    Together& stretch = stretches.back();
    stretch.end_ms = to_ms;
    for (const BusyChunk* chunk : busy) {
      stretch.bytes += chunk->rate() * (to_ms - from_ms);
      stretch.own_bytes += own[chunk->link] * (to_ms - from_ms);
    }
  }
  std::erase_if(stretches, [](const Together& stretch) { return stretch.bytes < MachineMeter::kStretch_bytes; });
  return stretches;
}

double host_rate(const std::deque<BusyChunk>& chunks, const std::vector<double>& own) {
  const std::vector<Together> stretches = stretches_together(chunks, own);
  std::vector<double> reached;
  for (const Together& stretch : stretches) reached.push_back(stretch.rate());
  const double best = second_best(reached);
  // One stretch may be off, so most of those that could have been faster than the best must have been held up.
  std::size_t could = 0, were = 0;
  for (const Together& stretch : stretches) {
    const double enough = kOwnShare * stretch.own_rate();
    if (enough <= best) continue;
    ++could;
    were += stretch.rate() >= enough ? 1 : 0;
  }
  return could > 2 * were ? best : 0;
}

}  // namespace

class MachineMeter::Link final : public transfer::LinkObserver {
 public:
  Link(std::size_t number, std::shared_ptr<Log> log) : number_(number), log_(std::move(log)) {}

  void arrived(int64_t bytes, double issued_ms, double arrived_ms) noexcept override {
    const MutexLock lock(log_->mutex);
    // A chunk that was issued while the one before it was on the link had to wait for that one.
    const double start_ms = std::max(issued_ms, last_ms_);
    const bool goes_on = issued_ms - last_ms_ < kPause_ms && last_ms_ - stretch_start_ms_ < kLongest_ms;
    if (!goes_on) {
      end_stretch();
      stretch_start_ms_ = start_ms;
    }
    stretch_bytes_ += static_cast<double>(bytes);
    last_ms_ = std::max(arrived_ms, start_ms);
    try {
      if (bytes <= kSmall_bytes && !goes_on) keep(small_ms_, arrived_ms - issued_ms, kSmallOnes);
      keep(log_->chunks, {number_, start_ms, last_ms_, static_cast<double>(bytes)}, kChunks);
    } catch (const std::bad_alloc&) {
      return;  // one reading less
    }
  }

  // Bytes per millisecond; 0 = not measured. REQUIRES: the log's lock.
  double rate() const {
    std::vector<double> rates(rates_.begin(), rates_.end());
    const double now = current_rate();
    if (now > 0) rates.push_back(now);
    return second_best(std::move(rates));
  }
  double small_ms() const { return middle_of({small_ms_.begin(), small_ms_.end()}); }

 private:
  template <typename T>
  static void keep(std::deque<T>& list, T value, std::size_t most) {
    list.push_back(std::move(value));
    if (list.size() > most) list.pop_front();
  }
  double current_rate() const {
    const double took_ms = last_ms_ - stretch_start_ms_;
    return stretch_bytes_ >= kStretch_bytes && took_ms > 0 ? stretch_bytes_ / took_ms : 0;
  }
  void end_stretch() {
    if (const double rate = current_rate(); rate > 0) keep(rates_, rate, kStretches);
    stretch_bytes_ = 0;
  }

  const std::size_t number_;
  const std::shared_ptr<Log> log_;
  // Protected by the log's lock.
  double last_ms_ = -std::numeric_limits<double>::infinity();  // when the last chunk arrived
  double stretch_start_ms_ = 0;
  double stretch_bytes_ = 0;
  std::deque<double> rates_;     // of past stretches, bytes per millisecond
  std::deque<double> small_ms_;  // that small transfers on an idle link took
};

double MachineRates::slowest(double LinkRates::* rate) const {
  double least = 0;
  for (const LinkRates& link : links) {
    if (link.*rate > 0 && (least == 0 || link.*rate < least)) least = link.*rate;
  }
  return least;
}

MachineMeter::MachineMeter(int devices) : log_(std::make_shared<Log>()) {
  for (std::size_t number = 0; number < 2 * static_cast<std::size_t>(devices); ++number)
    links_.push_back(std::make_shared<Link>(number, log_));
}

std::shared_ptr<transfer::LinkObserver> MachineMeter::link(int device, LinkWay way) const {
  return links_[2 * static_cast<std::size_t>(device) + (way == LinkWay::kUp ? 0 : 1)];
}

MachineRates MachineMeter::rates() const {
  const MutexLock lock(log_->mutex);
  MachineRates rates;
  std::vector<double> own;
  std::vector<double> small_up, small_down;
  for (std::size_t number = 0; number < links_.size(); number += 2) {
    const Link &up = *links_[number], &down = *links_[number + 1];
    own.insert(own.end(), {up.rate(), down.rate()});
    rates.links.push_back({own[number] / kGigabytePerSecond, own[number + 1] / kGigabytePerSecond});
    if (up.small_ms() > 0) small_up.push_back(up.small_ms());
    if (down.small_ms() > 0) small_down.push_back(down.small_ms());
  }
  rates.host_gb_per_s = host_rate(log_->chunks, own) / kGigabytePerSecond;
  if (!small_up.empty() && !small_down.empty()) rates.hop_latency_ms = middle_of(small_up) + middle_of(small_down);
  return rates;
}

}  // namespace roundpipe::runtime
