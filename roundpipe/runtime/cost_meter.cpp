#include <roundpipe/runtime/cost_meter.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace roundpipe::runtime {

using schedule::Phase;
using schedule::Range;

namespace {

// Until times are measured, a layer's cost is estimated from the size of its weights, with a lower bound.
constexpr double kBytesPerMs = 1e6;
constexpr double kLeast_ms = 0.01;
// The weight of a new measurement. The second one replaces the first, which includes one-time work and choices.
double weight_of_new(int calls) { return calls < 2 ? 1 : 0.3; }

// Speeds are compared by layers that take at least this long, in calls after the first.
constexpr double kComparable_ms = 0.05;
constexpr int kCallsToCompare = 2;
constexpr double kAlike = 0.1;
constexpr double kErrors = 3;  // a difference of so many standard errors is one
constexpr int kRounds = 20;

double median(std::vector<double>& values) {
  // The shorter of two: a job's first microbatch may include waiting.
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

CostMeter::CostMeter(const ModelState& model) : model_(model) {
  for (int l = 0; l < model.layer_count(); ++l) {
    weight_bytes_.push_back(lay_out_stage(model, l, l + 1).size_bytes);
    const double guess_ms = std::max(kLeast_ms, static_cast<double>(weight_bytes_.back()) / kBytesPerMs);
    layers_.push_back({guess_ms, 2 * guess_ms});
  }
}

double CostMeter::forward_ms(Range layers) const {
  double total = 0;
  for (int l = layers.first; l < layers.last; ++l) total += layers_[static_cast<size_t>(l)].forward_ms;
  return total;
}

void CostMeter::add_layers(const std::vector<LayerTime>& times, const std::vector<double>& speeds) {
  struct Sum {
    double ms = 0;
    int count = 0;
  };
  std::map<std::pair<int, bool>, Sum> sums;
  std::map<std::tuple<int, bool, int>, Sum> device_sums;
  for (const LayerTime& time : times) {
    const auto device = static_cast<size_t>(time.device);
    Sum& sum = sums[{time.layer, time.backward}];
    sum.ms += time.ms * speeds[device];
    ++sum.count;
    Sum& of_device = device_sums[{time.layer, time.backward, time.device}];
    of_device.ms += time.ms;
    ++of_device.count;
    Layer& layer = layers_[static_cast<size_t>(time.layer)];
    if (!time.backward) layer.output_bytes = time.output_bytes;
  }
  const auto take = [](double measured_ms, double& known_ms, int& calls) {
    known_ms += weight_of_new(calls) * (measured_ms - known_ms);
    ++calls;
  };
  for (const auto& [what, sum] : sums) {
    Layer& layer = layers_[static_cast<size_t>(what.first)];
    const double measured_ms = sum.ms / sum.count;
    if (measured_ms <= 0) continue;
    if (what.second) {
      take(measured_ms, layer.backward_ms, layer.backward_calls);
      layer.backward_clocked = true;
    } else {
      take(measured_ms, layer.forward_ms, layer.forward_calls);
      if (layer.backward_calls == 0) layer.backward_ms = 2 * layer.forward_ms;
    }
  }
  for (const auto& [what, sum] : device_sums) {
    const auto& [layer, backward, device] = what;
    Smoothed& smoothed = device_ms_[{layer, backward}][device];
    take(sum.ms / sum.count, smoothed.ms, smoothed.calls);
  }
}

void CostMeter::add(const std::vector<ExecutionRecord>& records, const std::vector<LayerTime>& layer_times) {
  int devices = 0;
  for (const ExecutionRecord& record : records) devices = std::max(devices, record.device + 1);
  for (const LayerTime& time : layer_times) devices = std::max(devices, time.device + 1);
  const std::vector<double> speed = speeds(devices);
  add_layers(layer_times, speed);
  std::map<std::tuple<Phase, int, int>, std::vector<double>> times;
  for (const ExecutionRecord& record : records) {
    times[{record.phase, record.layers.first, record.layers.last}].push_back(record.busy_ms() *
                                                                             speed[static_cast<size_t>(record.device)]);
  }
  const bool clocked = std::ranges::any_of(layer_times, [](const LayerTime& time) { return !time.backward; });
  // Forwards first: the time of a backward includes the forward that it recomputes.
  for (const bool forward : {true, false}) {
    for (auto& [stage, values] : times) {
      const auto [phase, first_layer, end] = stage;
      const schedule::Range layers{first_layer, end};
      if ((phase == Phase::kForward) != forward) continue;
      const double measured_ms = std::max(kLeast_ms, median(values));
      const auto scale = [&](double Layer::* field, int Layer::* calls, double thought_ms, double target_ms) {
        const double factor = thought_ms > 0 ? target_ms / thought_ms : 1;
        for (int l = layers.first; l < layers.last; ++l) {
          Layer& layer = layers_[static_cast<size_t>(l)];
          layer.*field *= 1 + weight_of_new(layer.*calls) * (factor - 1);
          ++(layer.*calls);
        }
      };
      const double thought_ms = forward_ms(layers);
      if (forward && clocked) continue;
      if (forward) {
        scale(&Layer::forward_ms, &Layer::forward_calls, thought_ms, measured_ms);
        continue;
      }
      double backward_ms = 0;
      bool forward_known = true, backward_clocked = true;
      for (int l = layers.first; l < layers.last; ++l) {
        backward_ms += layers_[static_cast<size_t>(l)].backward_ms;
        forward_known &= layers_[static_cast<size_t>(l)].forward_calls > 0;
        backward_clocked &= layers_[static_cast<size_t>(l)].backward_clocked;
      }
      if (clocked && backward_clocked) continue;
      if (!forward_known || (phase == Phase::kFused && !clocked)) {
        // Only measured together: divided in the usual ratio.
        if (!clocked) scale(&Layer::forward_ms, &Layer::forward_calls, thought_ms, measured_ms / 3);
        scale(&Layer::backward_ms, &Layer::backward_calls, backward_ms, measured_ms * 2 / 3);
      } else {
        scale(&Layer::backward_ms, &Layer::backward_calls, backward_ms,
              std::max(measured_ms - thought_ms, measured_ms / 10));
      }
    }
  }
}

std::vector<double> CostMeter::speeds(int devices) const {
  const auto count = static_cast<size_t>(devices);
  // log time = log work - log speed: fitted in turns, over the layers that several devices have run.
  struct Point {
    size_t layer, device;
    double log_ms;
  };
  std::vector<Point> points;
  size_t layers = 0;
  for (const auto& [what, of_devices] : device_ms_) {
    std::vector<Point> own;
    for (const auto& [device, smoothed] : of_devices) {
      if (device >= devices || smoothed.calls < kCallsToCompare || smoothed.ms < kComparable_ms) continue;
      own.push_back({layers, static_cast<size_t>(device), std::log(smoothed.ms)});
    }
    if (own.size() < 2) continue;
    points.insert(points.end(), own.begin(), own.end());
    ++layers;
  }
  std::vector<double> log_speed(count, 0);
  std::vector<int> compared(count, 0);
  for (const Point& point : points) ++compared[point.device];
  std::vector<double> log_work(layers, 0);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> sum(layers, 0), own_sum(count, 0);
    std::vector<int> number(layers, 0);
    for (const Point& point : points) {
      sum[point.layer] += point.log_ms + log_speed[point.device];
      ++number[point.layer];
    }
    for (size_t l = 0; l < layers; ++l) log_work[l] = sum[l] / number[l];
    for (const Point& point : points) own_sum[point.device] += log_work[point.layer] - point.log_ms;
    for (size_t d = 0; d < count; ++d) log_speed[d] = compared[d] > 0 ? own_sum[d] / compared[d] : 0;
  }
  double most = -HUGE_VAL, least = HUGE_VAL, error = 0;
  for (size_t d = 0; d < count; ++d) {
    if (compared[d] == 0) continue;
    most = std::max(most, log_speed[d]);
    least = std::min(least, log_speed[d]);
    double squares = 0;
    for (const Point& point : points) {
      const double off = point.log_ms + log_speed[point.device] - log_work[point.layer];
      squares += point.device == d ? off * off : 0;
    }
    error = std::max(error, std::sqrt(squares) / compared[d]);
  }
  std::vector<double> result(count, 1);
  if (!(most - least > std::max(std::log1p(kAlike), kErrors * error))) return result;
  for (size_t d = 0; d < count; ++d) {
    if (compared[d] > 0) result[d] = std::exp(log_speed[d] - most);
  }
  return result;
}

bool CostMeter::knows(bool backward, int calls) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& layer) {
    return layer.forward_calls >= calls && (!backward || layer.backward_calls >= calls);
  });
}

void CostMeter::set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes) {
  saved_bytes_ = std::move(saved_bytes);
  activation_bytes_ = std::move(activation_bytes);
}

schedule::LayerCosts CostMeter::costs() const {
  schedule::LayerCosts costs;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const auto layer = static_cast<int>(l);
    schedule::LayerCost cost;
    cost.forward_ms = layers_[l].forward_ms;
    cost.backward_ms = layers_[l].backward_ms;
    cost.weight_bytes = weight_bytes_[l];
    const StageLayout layout = lay_out_stage(model_, layer, layer + 1);
    cost.gradient_bytes = layout.gradient_bytes;
    cost.partial_sum_bytes = layout.sum_bytes;
    cost.joined = joined_gradients(model_, layer);
    cost.trained = layout.gradient_bytes > 0;
    cost.activation_bytes = activation_bytes_.empty() ? layers_[l].output_bytes : activation_bytes_[l];
    if (!saved_bytes_.empty()) cost.saved_bytes = saved_bytes_[l];
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace roundpipe::runtime
