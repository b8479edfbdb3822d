#include <roundpipe/simulate/node_exchange.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe::simulate {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kBytesPerMs = 1e6;  // of 1 GB/s
constexpr std::size_t kNorm = static_cast<std::size_t>(-1);

double rate_of(double gb_per_s) { return gb_per_s > 0 ? gb_per_s * kBytesPerMs : kNever; }

void require_finite(double value, const char* field) {
  if (!(value >= 0) || !std::isfinite(value))
    throw std::invalid_argument(concat("[nodes] ", field, " is ", value, ", expected a finite number from 0 up"));
}

}  // namespace

NodeExchange::NodeExchange(const schedule::LayerCosts& costs, std::vector<char> expected, const NodeRules& rules,
                           double update_gb_per_s, bool paced)
    : costs_(costs),
      rules_(rules),
      update_bytes_per_ms_(rate_of(update_gb_per_s)),
      network_bytes_per_ms_(rate_of(rules.network_gb_per_s)),
      paced_(paced),
      trains_(std::move(expected)),
      landed_(trains_.size(), 0),
      published_(trains_.size(), 0),
      update_ends_ms_(kNever),
      next_ms_(kNever) {
  if (rules.nodes < 1)
    throw std::invalid_argument("[nodes] nodes is " + std::to_string(rules.nodes) + ", expected at least 1");
  require_finite(update_gb_per_s, "update_gb_per_s");
  require_finite(rules.network_gb_per_s, "network_gb_per_s");
  require_finite(rules.latency_ms, "latency_ms");
  left_.assign(trains_.size() / costs.size(), 0);
  for (std::size_t place = 0; place < trains_.size(); ++place) {
    const schedule::LayerCost& cost = cost_of(place);
    if (trains_[place] == 0) published_[place] = 1;
    if (!cost.trained && cost.updated_bytes() == 0) trains_[place] = 0;
    if (trains_[place] != 0) ++left_[place / costs.size()];
  }
  if (rules.nodes > 1) list_turns();
}

void NodeExchange::list_turns() {
  updated_.assign(trains_.size(), 0);
  for (std::size_t step = 0; step < left_.size(); ++step) {
    for (std::size_t layer = costs_.size(); layer-- > 0;) {
      if (trains_[at(step, layer)] != 0) gradients_.places.push_back(at(step, layer));
    }
    if (rules_.clipped && left_[step] > 0) gradients_.places.push_back(kNorm);
    for (std::size_t i = 0; i < costs_.size(); ++i) {
      const std::size_t layer = rules_.at_once ? costs_.size() - 1 - i : i;
      if (trains_[at(step, layer)] != 0) weights_.places.push_back(at(step, layer));
    }
  }
}

void NodeExchange::land(std::size_t step, std::size_t layer) {
  const std::size_t place = at(step, layer);
  landed_[place] = 1;
  if (trains_[place] == 0)
    to_update_.push_back(place);
  else if (rules_.nodes == 1)
    exchanged(place);
}

bool NodeExchange::run(double now_ms) {
  move_bytes(now_ms);
  any_published_ = false;
  do {
    // All that ends now, before the lowest layer is chosen.
    while (end_update() || go_on(gradients_) || go_on(weights_)) continue;
  } while (begin_update());
  set_next();
  return any_published_;
}

// Whether the channel has come further.
bool NodeExchange::go_on(Channel& channel) {
  if (channel.state == Channel::kWaits) {
    if (!may_begin(channel)) return false;
    const std::size_t place = channel.places[channel.next];
    const bool has_header = &channel == &gradients_ && place != kNorm;
    channel.state = Channel::kLatency;
    channel.ends_ms = now_ms_ + rules_.latency_ms * (has_header ? 2 : 1);
    channel.left_bytes = 0;
    if (place != kNorm && network_bytes_per_ms_ < kNever) {
      const auto bytes = &channel == &gradients_ ? cost_of(place).gradient_bytes : cost_of(place).updated_bytes();
      channel.left_bytes = static_cast<double>(bytes) * (rules_.nodes - 1) / rules_.nodes;
    }
    return true;
  }
  if (channel.ends_ms > now_ms_) return false;
  if (channel.state == Channel::kLatency && channel.left_bytes > 0) {
    channel.state = Channel::kMoves;
    channel.ends_ms = kNever;  // until set_next()
    return true;
  }
  channel.state = Channel::kWaits;
  over(channel);
  ++channel.next;
  return true;
}

bool NodeExchange::may_begin(const Channel& channel) const {
  if (channel.next == channel.places.size()) return false;
  const std::size_t place = channel.places[channel.next];
  if (place == kNorm) return true;
  return (&channel == &gradients_ ? landed_ : updated_)[place] != 0;
}

void NodeExchange::over(const Channel& channel) {
  const std::size_t place = channel.places[channel.next];
  if (place == kNorm) {
    to_update_.insert(to_update_.end(), held_.begin(), held_.end());
    held_.clear();
  } else if (&channel == &gradients_) {
    exchanged(place);
  } else {
    publish(place);
  }
}

void NodeExchange::exchanged(std::size_t place) {
  if (!rules_.clipped) {
    to_update_.push_back(place);
    return;
  }
  held_.push_back(place);
  if (rules_.nodes > 1) return;
  const std::size_t step = place / costs_.size();
  if (--left_[step] > 0) return;
  const auto of_step = [&](std::size_t held) { return held / costs_.size() == step; };
  std::ranges::copy_if(held_, std::back_inserter(to_update_), of_step);
  std::erase_if(held_, of_step);
}

bool NodeExchange::begin_update() {
  if (updating_now_ || to_update_.empty()) return false;
  const auto lowest = std::ranges::min_element(to_update_);
  updating_ = *lowest;
  to_update_.erase(lowest);
  updating_now_ = true;
  update_left_bytes_ = static_cast<double>(cost_of(updating_).updated_bytes()) / rules_.nodes;
  update_ends_ms_ = now_ms_ + update_left_bytes_ / update_bytes_per_ms_;
  if (paced_ && update_left_bytes_ > 0) {
    update_ends_ms_ = kNever;  // until pace()
    paced_at_ms_ = now_ms_;
    pace_bytes_per_ms_ = 0;
  }
  return true;
}

void NodeExchange::pace(double now_ms, double bytes_per_ms) {
  const double rate = std::min(bytes_per_ms, update_bytes_per_ms_);
  if (!updating_now_ || rate == pace_bytes_per_ms_) return;
  update_left_bytes_ = std::max(0.0, update_left_bytes_ - (now_ms - paced_at_ms_) * pace_bytes_per_ms_);
  paced_at_ms_ = now_ms;
  pace_bytes_per_ms_ = rate;
  update_ends_ms_ = now_ms + update_left_bytes_ / rate;
  set_next();
}

bool NodeExchange::end_update() {
  if (update_ends_ms_ > now_ms_) return false;
  update_ends_ms_ = kNever;
  updating_now_ = false;
  updated(updating_);
  return true;
}

void NodeExchange::updated(std::size_t place) {
  if (rules_.nodes == 1 || trains_[place] == 0)
    publish(place);
  else
    updated_[place] = 1;
}

void NodeExchange::publish(std::size_t place) {
  published_[place] = 1;
  any_published_ = true;
}

int NodeExchange::moving() const {
  return (gradients_.state == Channel::kMoves ? 1 : 0) + (weights_.state == Channel::kMoves ? 1 : 0);
}

void NodeExchange::move_bytes(double now_ms) {
  const int sharing = moving();
  for (Channel* channel : {&gradients_, &weights_}) {
    if (channel->state == Channel::kMoves) channel->left_bytes -= (now_ms - now_ms_) * network_bytes_per_ms_ / sharing;
  }
  if (sharing > 0) network_busy_ms_ += now_ms - now_ms_;
  now_ms_ = now_ms;
}

void NodeExchange::set_next() {
  next_ms_ = update_ends_ms_;
  const int sharing = moving();
  for (Channel* channel : {&gradients_, &weights_}) {
    if (channel->state == Channel::kMoves)
      channel->ends_ms = now_ms_ + std::max(0.0, channel->left_bytes) * sharing / network_bytes_per_ms_;
    if (channel->state != Channel::kWaits) next_ms_ = std::min(next_ms_, channel->ends_ms);
  }
}

}  // namespace roundpipe::simulate
