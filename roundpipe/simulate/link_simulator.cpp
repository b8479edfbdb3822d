#include <roundpipe/simulate/link_simulator.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include <roundpipe/schedule/placer.h>
#include <roundpipe/simulate/fair_share.h>

namespace roundpipe::simulate {

using schedule::Job;
using schedule::Phase;
using schedule::Plan;
using schedule::Priority;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kBytesPerMs = 1e6;  // of 1 GB/s
constexpr double kByte = 0.5;        // less than this is rounding

struct JobRun;

struct Transfer {
  JobRun* run = nullptr;  // whose it is; of a device's list, which never grows while it runs
  int priority = 0;
  std::int64_t order = 0;  // by request
  double left_bytes = 0;
  TransferEvent what;
  int microbatch = -1;  // of a value
  int layer = 0;        // of weights or their gradient
};

// One direction of one device's link.
struct Link {
  double rate = kNever;  // bytes per millisecond
  std::vector<Transfer> waiting;
  bool busy = false, may_send = false;
  Transfer current;
  double chunk_bytes = 0;  // left of the current chunk; 0: at its end, where a more urgent transfer may go first
  bool outranked = false;  // a more urgent transfer waits
};

struct JobRun {
  int step = 0;
  int number = 0;
  const Job* job = nullptr;
  double up_ms = 0;    // of a microbatch through the layers: the forward, or the recompute of a backward job
  double down_ms = 0;  // and back
  bool weights_asked = false;
  int weights_here = 0;  // layers, from the first on
  int next_asked = 0;    // microbatches whose values are requested, from the first on
  std::vector<char> input_here, gradient_here;
  int next = 0;  // microbatches that have ended, from the first on
  enum { kIdle, kUp, kWait, kDown } state = kIdle;
  int passed = 0;   // layers that the microbatch is through, in this direction
  int passing = 0;  // and is going through now
};

struct DeviceRun {
  std::vector<JobRun> jobs;
  std::size_t at = 0;
  double* ends_ms = nullptr;  // of the running computation, in ends_ms_
  bool may_start = true;      // something has changed that its jobs wait for
};

class LinkSimulator {
 public:
  LinkSimulator(std::span<const Plan> plans, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                const LinkRules& rules)
      : plans_(plans),
        costs_(costs),
        cluster_(cluster),
        rules_(rules),
        sums_(costs, plans[0].first_backward_layer),
        kept_(costs, cluster),
        host_rate_(cluster.host_gb_per_s > 0 ? cluster.host_gb_per_s * kBytesPerMs : kNever),
        updates_share_(host_rate_ < kNever && rules.update.traffic > 0),
        update_claim_(rules.update.gb_per_s > 0 ? rules.update.gb_per_s * kBytesPerMs * rules.update.traffic : kNever),
        gradients_left_(gradients_of(plans)),
        exchange_(costs, expected(gradients_left_), rules.nodes, rules.update.gb_per_s, updates_share_) {
    const Plan& first = plans[0];
    layers_ = first.layers;
    microbatches_ = first.microbatches;
    lowest_ = first.first_backward_layer;
    outside_loss_ = schedule::mode_of(first) == schedule::PlanMode::kTrain;
    staleness_ = rules.timing.asynchronous ? 2 : 1;
    devices_.resize(cluster.devices.size());
    ends_ms_.resize(devices_.size(), kNever);
    for (std::size_t d = 0; d < devices_.size(); ++d) devices_[d].ends_ms = &ends_ms_[d];
    links_.resize(2 * cluster.devices.size());
    for (std::size_t i = 0; i < links_.size(); ++i)
      links_[i].rate = (i % 2 == 0 ? cluster.link_up_gb_per_s : cluster.link_down_gb_per_s) * kBytesPerMs;
    for (Link& link : links_) link.rate = link.rate > 0 ? link.rate : kNever;
    for (std::size_t way = 0; way < 2; ++way) claims_[way].most = links_[way].rate;
    queue_jobs();
    const std::size_t cells = plans.size() * static_cast<std::size_t>((layers_ + 1) * microbatches_);
    value_on_host_.assign(cells, 0);
    gradient_on_host_.assign(cells, 0);
    read_.assign(static_cast<std::size_t>(layers_) + 1, 0);
    for (const Plan& plan : plans) {
      for (const Job& job : plan.jobs) read_[static_cast<std::size_t>(job.layers.first)] = 1;
    }
    outputs_left_.assign(plans.size(), microbatches_);
  }

  LinkTimeline run() {
    while (true) {
      start_what_can();
      share_host();
      const double next_ms = next_event();
      if (next_ms == kNever) break;
      advance(next_ms);
    }
    for (const DeviceRun& device : devices_) {
      if (device.at < device.jobs.size())
        throw std::logic_error("[simulate_links] stuck at job " + schedule::to_string(*device.jobs[device.at].job));
    }
    return finish();
  }

 private:
  // [step, layer]: how many jobs make gradients of it.
  static std::vector<int> gradients_of(std::span<const Plan> plans) {
    std::vector<int> gradients(plans.size() * static_cast<std::size_t>(plans[0].layers), 0);
    for (std::size_t step = 0; step < plans.size(); ++step) {
      for (const Job& job : plans[step].jobs) {
        if (job.phase == Phase::kForward) continue;
        for (int layer = job.layers.first; layer < job.layers.last; ++layer)
          ++gradients[step * static_cast<std::size_t>(plans[0].layers) + static_cast<std::size_t>(layer)];
      }
    }
    return gradients;
  }
  static std::vector<char> expected(const std::vector<int>& gradients) {
    std::vector<char> any;
    for (const int count : gradients) any.push_back(count > 0 ? 1 : 0);
    return any;
  }
  std::size_t at_cell(int step, int boundary, int m) const {
    return static_cast<std::size_t>((step * (layers_ + 1) + boundary) * microbatches_ + m);
  }

  void queue_jobs() {
    struct Turn {
      double place;
      int step, number;
    };
    std::vector<Turn> turns;
    for (int step = 0; step < static_cast<int>(plans_.size()); ++step) {
      const Plan& plan = plans_[static_cast<std::size_t>(step)];
      for (int number = 0; number < static_cast<int>(plan.jobs.size()); ++number)
        turns.push_back({step + plan.jobs[static_cast<std::size_t>(number)].order, step, number});
    }
    std::ranges::stable_sort(turns, {}, &Turn::place);
    for (const Turn& turn : turns) {
      const Job& job = plans_[static_cast<std::size_t>(turn.step)].jobs[static_cast<std::size_t>(turn.number)];
      const double speed = speed_of(job);
      JobRun run;
      run.step = turn.step;
      run.number = turn.number;
      run.job = &job;
      run.up_ms = up_ms(job, job.layers) / speed;
      if (job.phase != Phase::kForward) run.down_ms = sums_.backward_ms(job.layers) / speed;
      const auto count = static_cast<std::size_t>(job.microbatches.size());
      run.input_here.assign(count, job.layers.first == 0);
      run.gradient_here.assign(count, job.phase != Phase::kBackward);
      devices_[static_cast<std::size_t>(job.device)].jobs.push_back(std::move(run));
    }
  }

  double up_ms(const Job& job, schedule::Range layers) const {
    return job.phase == Phase::kBackward ? sums_.recompute_ms(layers) : sums_.forward_ms(layers);
  }
  double speed_of(const Job& job) const { return cluster_.devices[static_cast<std::size_t>(job.device)].speed; }

  bool weights_published(const JobRun& run) const {
    if (run.job->phase == Phase::kBackward || run.step < staleness_) return true;
    const auto read = static_cast<std::size_t>(run.step - staleness_);
    for (int layer = run.job->layers.first; layer < run.job->layers.last; ++layer) {
      if (!exchange_.published(read, static_cast<std::size_t>(layer))) return false;
    }
    return true;
  }

  double boundary_bytes(int boundary) const {
    return boundary == 0 ? 0 : static_cast<double>(costs_[static_cast<std::size_t>(boundary) - 1].activation_bytes);
  }

  void ask(int device, bool up, Priority kind, JobRun& run, int microbatch, double bytes, int layer = 0) {
    Transfer transfer;
    transfer.run = &run;
    transfer.priority = rules_.priorities ? static_cast<int>(kind) : 0;
    transfer.order = asked_++;
    transfer.left_bytes = bytes;
    transfer.what = {device, up, kind, run.step, run.number, 0, 0};
    transfer.microbatch = microbatch;
    transfer.layer = layer;
    Link& link = links_[static_cast<std::size_t>(2 * device + (up ? 0 : 1))];
    link.outranked |= link.busy && transfer.priority < link.current.priority;
    link.waiting.push_back(transfer);
    link.may_send = true;
  }

  // Starts everything that can start now.
  void start_what_can() {
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      DeviceRun& device = devices_[d];
      if (!std::exchange(device.may_start, false)) continue;
      for (std::size_t i = device.at; i < std::min(device.at + 2, device.jobs.size()); ++i)
        prefetch(static_cast<int>(d), device.jobs[i]);
      compute(device);
    }
    upload_what_arrived();
    for (Link& link : links_) {
      if (std::exchange(link.may_send, false)) send(link);
    }
  }

  void prefetch(int device, JobRun& run) {
    if (!run.weights_asked && weights_published(run)) {
      run.weights_asked = true;
      for (int layer = run.job->layers.first; layer < run.job->layers.last; ++layer) {
        const schedule::Range one{layer, layer + 1};
        const std::int64_t bytes = sums_.weight_bytes(one) - kept_.kept_bytes(one, device);
        kept_.meet(one, device);
        ask(device, true, Priority::kWeight, run, -1, static_cast<double>(bytes), layer);
      }
    }
    const int count = run.job->microbatches.size();
    while (run.next_asked < std::min(count, run.next + rules_.prefetched_values)) {
      const int m = run.job->microbatches.first + run.next_asked;
      if (run.job->layers.first > 0 || run.job->phase == Phase::kBackward) {
        wanted_.push_back({device, &run, m});
        host_changed_ = true;
      }
      ++run.next_asked;
    }
    upload_what_arrived();
  }

  // Requests the wanted values that are on the host by now.
  void upload_what_arrived() {
    if (!std::exchange(host_changed_, false)) return;
    std::erase_if(wanted_, [&](Wanted& wanted) {
      JobRun& of = *wanted.run;
      const Job& job = *of.job;
      if (!wanted.input_asked && job.layers.first > 0 && value_on_host_[at_cell(of.step, job.layers.first, wanted.m)]) {
        wanted.input_asked = true;
        ask(wanted.device, true, Priority::kActivation, of, wanted.m, boundary_bytes(job.layers.first));
      }
      const bool loss = outside_loss_ && job.layers.last == layers_;
      if (!wanted.gradient_asked && job.phase == Phase::kBackward &&
          (loss ? outputs_left_[static_cast<std::size_t>(of.step)] == 0
                : gradient_on_host_[at_cell(of.step, job.layers.last, wanted.m)])) {
        wanted.gradient_asked = true;
        ask(wanted.device, true, Priority::kBoundaryGradient, of, wanted.m, boundary_bytes(job.layers.last));
      }
      return (wanted.input_asked || job.layers.first == 0) && (wanted.gradient_asked || job.phase != Phase::kBackward);
    });
  }

  void compute(DeviceRun& device) {
    if (*device.ends_ms != kNever || device.at >= device.jobs.size()) return;
    JobRun& run = device.jobs[device.at];
    const Job& job = *run.job;
    const int layers = job.layers.size();
    const auto place = static_cast<std::size_t>(run.next);
    if (run.state == JobRun::kIdle) {
      // The caller takes the loss of the whole batch, and only then asks for the backward.
      const bool loss = outside_loss_ && job.phase == Phase::kBackward;
      if (!run.input_here[place] || (loss && outputs_left_[static_cast<std::size_t>(run.step)] > 0)) return;
      run.state = JobRun::kUp;
      run.passed = 0;
    }
    if (run.state == JobRun::kUp) {
      if (run.weights_here == layers) {
        pass(device, run, layers - run.passed);
      } else if (run.passed < run.weights_here) {
        pass(device, run, 1);
      }
      return;
    }
    if (run.state == JobRun::kWait && run.gradient_here[place]) {
      run.state = JobRun::kDown;
      run.passed = 0;
    }
    // With its last microbatch, the gradient of each layer leaves once it is complete.
    if (run.state == JobRun::kDown) pass(device, run, run.next + 1 < job.microbatches.size() ? layers : 1);
  }

  // The microbatch goes through the next `count` layers in its direction.
  void pass(DeviceRun& device, JobRun& run, int count) {
    const Job& job = *run.job;
    const bool up = run.state == JobRun::kUp, whole = count == job.layers.size();
    run.passing = count;
    double ms = up ? run.up_ms : run.down_ms;
    if (!whole) {
      const int first = up ? job.layers.first + run.passed : job.layers.last - run.passed - count;
      const schedule::Range layers{first, first + count};
      ms = (up ? up_ms(job, layers) : sums_.backward_ms(layers)) / speed_of(job);
    }
    *device.ends_ms = now_ms_ + ms;
  }

  void send(Link& link) {
    if (link.busy || link.waiting.empty()) return;
    const auto best = std::ranges::min_element(link.waiting, {},
                                               [](const Transfer& t) { return std::make_pair(t.priority, t.order); });
    link.current = *best;
    link.waiting.erase(best);
    link.busy = true;
    ++claim_of(link).count;
    busy_links_.insert(std::ranges::lower_bound(busy_links_, &link), &link);
    link.current.what.start_ms = now_ms_;
    link.chunk_bytes = next_chunk_bytes(link);
  }

  double next_chunk_bytes(const Link& link) const {
    const auto most = static_cast<double>(rules_.chunk_bytes);
    return rules_.chunk_bytes > 0 ? std::min(link.current.left_bytes, most) : link.current.left_bytes;
  }

  // Until when a busy link moves its transfer without a choice: the end of the chunk if another is more urgent.
  double bytes_before_choice(const Link& link) const {
    return link.outranked ? std::clamp(link.chunk_bytes, 0.0, link.current.left_bytes) : link.current.left_bytes;
  }

  // Of the links of that direction.
  Claim& claim_of(const Link& link) { return claims_[static_cast<std::size_t>(&link - links_.data()) % 2]; }

  void share_host() {
    if (host_rate_ == kNever) return;
    const bool updates = updates_share_ && exchange_.updating();
    host_share_ = fair_share(host_rate_, {claims_[0], claims_[1], {updates ? 1 : 0, update_claim_}});
    if (updates) exchange_.pace(now_ms_, host_share_ / rules_.update.traffic);
  }

  double next_event() const {
    double next_ms = exchange_.next_ms();
    for (const double ends_ms : ends_ms_) next_ms = std::min(next_ms, ends_ms);
    for (const Link* link : busy_links_)
      next_ms = std::min(next_ms, now_ms_ + bytes_before_choice(*link) / std::min(link->rate, host_share_));
    return next_ms;
  }

  void advance(double to_ms) {
    ended_.clear();
    for (Link* const busy : busy_links_) {
      Link& link = *busy;
      const double speed = std::min(link.rate, host_share_), most = bytes_before_choice(link);
      double moved = speed == kNever ? most : std::min(most, speed * (to_ms - now_ms_));
      // Late in a long run, the clock cannot tell the moment when the rest has moved.
      if (most - moved > kByte && to_ms + (most - moved) / speed == to_ms) moved = most;
      link.current.left_bytes -= moved;
      link.chunk_bytes -= moved;
      if (link.chunk_bytes < -kByte) {
        const auto chunk = static_cast<double>(rules_.chunk_bytes);
        link.chunk_bytes = chunk + std::fmod(link.chunk_bytes, chunk);
        if (link.chunk_bytes > chunk - kByte) link.chunk_bytes = 0;
      }
      if (most - moved <= kByte) ended_.push_back(&link);
    }
    now_ms_ = to_ms;
    for (Link* const link : ended_) release(*link);
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (ends_ms_[d] <= now_ms_) compute_over(static_cast<int>(d), devices_[d]);
    }
    if (landed_ || exchange_.next_ms() <= now_ms_) {
      landed_ = false;
      if (exchange_.run(now_ms_)) all_may_start();
    }
  }

  // The transfer has ended, or has to wait for a more urgent one.
  void release(Link& link) {
    link.busy = link.outranked = false;
    link.may_send = true;
    --claim_of(link).count;
    busy_links_.erase(std::ranges::find(busy_links_, &link));
    Transfer transfer = link.current;
    transfer.what.end_ms = now_ms_;
    transfers_.push_back(transfer.what);
    if (transfer.left_bytes > kByte) {
      link.waiting.push_back(transfer);
      return;
    }
    JobRun& run = *transfer.run;
    const Job& job = *run.job;
    const auto place = static_cast<std::size_t>(transfer.microbatch - job.microbatches.first);
    if (transfer.what.up) {
      devices_[static_cast<std::size_t>(transfer.what.device)].may_start = true;
      if (transfer.what.kind == Priority::kWeight) ++run.weights_here;
      if (transfer.what.kind == Priority::kActivation) run.input_here[place] = 1;
      if (transfer.what.kind == Priority::kBoundaryGradient) run.gradient_here[place] = 1;
      return;
    }
    host_changed_ = true;
    if (transfer.what.kind == Priority::kActivation) value_on_host_[cell_of_[transfer.order]] = 1;
    if (transfer.what.kind == Priority::kBoundaryGradient)
      gradient_on_host_[at_cell(run.step, job.layers.first, transfer.microbatch)] = 1;
    if (transfer.what.kind == Priority::kParameterGradient) land(run, transfer.layer);
  }

  void compute_over(int d, DeviceRun& device) {
    JobRun& run = device.jobs[device.at];
    const Job& job = *run.job;
    *device.ends_ms = kNever;
    device.may_start = true;
    run.passed += run.passing;
    const bool leaves = run.state == JobRun::kDown && run.next + 1 == job.microbatches.size();
    if (run.passed < job.layers.size()) {
      if (leaves) leave(d, run);
      return;
    }
    if (run.state == JobRun::kUp && job.phase != Phase::kForward) {
      run.state = JobRun::kWait;
      return;
    }
    const int m = job.microbatches.first + run.next;
    // Waits in between are shown before it, as in simulate().
    const double start_ms = now_ms_ - run.down_ms - run.up_ms,
                 recompute_ms = job.phase == Phase::kBackward ? run.up_ms : 0;
    events_.push_back({run.number, m, d, run.step, job.phase, start_ms, now_ms_, recompute_ms});
    busy_ms_ += run.down_ms + run.up_ms;
    if (job.phase != Phase::kBackward) {
      for (int boundary = job.layers.first + 1; boundary <= job.layers.last; ++boundary) {
        if (job.phase == Phase::kFused) break;
        if (boundary == layers_) {
          if (--outputs_left_[static_cast<std::size_t>(run.step)] > 0) continue;
          host_changed_ = true;
          all_may_start();
          continue;
        }
        if (!read_[static_cast<std::size_t>(boundary)]) continue;
        cell_of_.resize(static_cast<std::size_t>(asked_) + 1);
        cell_of_[static_cast<std::size_t>(asked_)] = at_cell(run.step, boundary, m);
        ask(d, false, Priority::kActivation, run, m, boundary_bytes(boundary));
      }
    }
    if (job.phase != Phase::kForward && job.layers.first > 0 && job.layers.first > lowest_)
      ask(d, false, Priority::kBoundaryGradient, run, m, boundary_bytes(job.layers.first));
    if (leaves) leave(d, run);
    run.state = JobRun::kIdle;
    if (++run.next == job.microbatches.size()) ++device.at;
  }

  // The job's last microbatch has gone back through a layer.
  void leave(int d, JobRun& run) {
    const Job& job = *run.job;
    const int layer = job.layers.last - run.passed;
    const bool whole = job.microbatches.size() == microbatches_;
    const std::int64_t bytes = sums_.leaving_gradient_bytes(layer, job.layers, whole);
    if (bytes > 0) {
      ask(d, false, Priority::kParameterGradient, run, -1, static_cast<double>(bytes), layer);
    } else {
      land(run, layer);
    }
  }

  void land(const JobRun& run, int layer) {
    const auto step = static_cast<std::size_t>(run.step), at = static_cast<std::size_t>(layer);
    if (--gradients_left_[step * static_cast<std::size_t>(layers_) + at] == 0) exchange_.land(step, at);
    landed_ = true;
  }

  void all_may_start() {
    for (DeviceRun& device : devices_) device.may_start = true;
  }

  LinkTimeline finish() {
    LinkTimeline result;
    std::ranges::stable_sort(events_, {},
                             [](const TimelineEvent& e) { return std::make_tuple(e.step, e.job, e.microbatch); });
    std::vector<double> step_end(plans_.size(), 0.0);
    for (const TimelineEvent& event : events_) {
      double& end_ms = step_end[static_cast<std::size_t>(event.step)];
      end_ms = std::max(end_ms, event.end_ms);
    }
    Timeline& timeline = result.timeline;
    timeline.events = std::move(events_);
    // A step is over when those before it are, too, though its device may be done earlier.
    std::partial_sum(step_end.begin(), step_end.end(), step_end.begin(), std::ranges::max);
    timeline.makespan_ms = step_end.back();
    result.landed_ms = std::max(now_ms_, timeline.makespan_ms);
    // A single step ends when its last gradient has landed and its last update is done.
    timeline.steady_step_ms = plans_.size() == 1 ? result.landed_ms : schedule::pace_ms(step_end);
    const auto devices = static_cast<double>(devices_.size());
    const auto idle = [&](double busy_ms, double span_ms) {
      return span_ms > 0 ? 1 - busy_ms / (devices * span_ms) : 0;
    };
    timeline.bubble = idle(busy_ms_, timeline.makespan_ms);
    timeline.steady_bubble = idle(busy_ms_ / static_cast<double>(plans_.size()), timeline.steady_step_ms);
    result.transfers = std::move(transfers_);
    result.network_busy_ms = exchange_.network_busy_ms();
    return result;
  }

  struct Wanted {
    int device;
    JobRun* run;
    int m;
    bool input_asked = false, gradient_asked = false;
  };

  const std::span<const Plan> plans_;
  const schedule::LayerCosts& costs_;
  const schedule::Cluster& cluster_;
  const LinkRules rules_;
  const schedule::CostSums sums_;
  schedule::KeptWeights kept_;
  int layers_ = 0, microbatches_ = 0, lowest_ = 0, staleness_ = 2;
  bool outside_loss_ = false;
  double now_ms_ = 0;
  double busy_ms_ = 0;
  std::vector<DeviceRun> devices_;
  std::vector<double> ends_ms_;    // of each device: together, since every event reads them all
  std::vector<Link> links_;        // up and down of each device
  std::vector<Link*> busy_links_;  // in their order
  std::vector<Link*> ended_;       // of advance()
  std::array<Claim, 2> claims_;    // of the busy links on the host's bandwidth: up and down
  const double host_rate_;         // bytes per millisecond
  const bool updates_share_;       // whether updates take a part of it
  const double update_claim_;      // the most that one can take
  double host_share_ = kNever;     // of each claim
  std::int64_t asked_ = 0;
  std::vector<std::size_t> cell_of_;  // by Transfer::order, for values that are downloaded
  std::vector<Wanted> wanted_;
  std::vector<char> value_on_host_, gradient_on_host_;
  bool host_changed_ = false;        // one of them, or the last output of a step
  std::vector<char> read_;           // whether some job starts at the boundary
  std::vector<int> outputs_left_;    // [step]: outputs of a train plan still to come
  std::vector<int> gradients_left_;  // [step, layer]
  bool landed_ = false;              // a gradient, and exchange_ has not run since
  NodeExchange exchange_;
  std::vector<TimelineEvent> events_;
  std::vector<TransferEvent> transfers_;
};

}  // namespace

LinkTimeline simulate_links(std::span<const Plan> plans, const schedule::LayerCosts& costs,
                            const schedule::Cluster& cluster, const LinkRules& rules) {
  // simulate() checks the plan, the costs and the cluster.
  simulate(plans.subspan(0, std::min<std::size_t>(1, plans.size())), costs, cluster, rules.timing);
  for (const Plan& plan : plans) {
    schedule::validate(plan, schedule::mode_of(plan));
    if (plan.layers != plans[0].layers || plan.microbatches != plans[0].microbatches ||
        plan.devices != plans[0].devices)
      throw std::invalid_argument("[simulate_links] the plans differ in their sizes");
  }
  if (rules.prefetched_values < 1 || rules.chunk_bytes < 0)
    throw std::invalid_argument("[simulate_links] prefetched_values or chunk_bytes is out of range");
  schedule::validate(rules.update);
  return LinkSimulator(plans, costs, cluster, rules).run();
}

}  // namespace roundpipe::simulate
