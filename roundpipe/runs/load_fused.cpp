#include <roundpipe/runs/load_fused.h>

#include <algorithm>
#include <deque>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <roundpipe/core/error.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/saving/contents.h>
#include <roundpipe/saving/state_reads.h>

namespace roundpipe {

namespace {

bool is_remainder(const at::Tensor& rest) {
  return rest.defined() && (rest.scalar_type() == at::kShort || rest.scalar_type() == at::kChar);
}

// The same remainder of 16 bits.
at::Tensor in_16_bits(const at::Tensor& remainder) {
  const at::Tensor wide = at::empty(remainder.sizes(), at::kShort);
  optim::convert_remainder(remainder, wide);
  return wide;
}

// A trained parameter whose dtype differs from the checkpoint's; its fp32 master stays the same.
struct Converted {
  std::string in_file;
  at::Tensor weight;      // takes the saved weights
  at::Tensor saved_rest;  // takes what their master has beyond them; undefined if nothing was saved
  at::Tensor target;      // the model's weights
  at::Tensor remainder;   // the model's, of the elements of `range`; undefined for fp32
  std::optional<ElementsOf> range;
  bool is_done = false;

  void finish() {
    if (std::exchange(is_done, true)) return;
    const at::NoGradGuard no_grad;
    at::Tensor master = weight.to(at::kFloat);
    if (is_remainder(saved_rest)) {
      master = at::empty(weight.sizes(), at::kFloat);
      optim::join(weight, in_16_bits(saved_rest), master, *optim::ThreadPool::current());
    } else if (saved_rest.defined()) {
      master = saved_rest;
    }
    if (is_remainder(remainder)) {
      const at::Tensor high = at::empty_like(master, at::kBFloat16), low = at::empty_like(master, at::kShort);
      optim::split(master, high, low, *optim::ThreadPool::current());
      target.copy_(high);
      optim::convert_remainder(own(low), remainder);
      return;
    }
    target.copy_(master);
    if (remainder.defined()) remainder.copy_(own(master));
  }

  // This process's elements, in the order of the parameter's memory.
  at::Tensor own(const at::Tensor& values) const {
    if (!range) return values;
    return own_elements(at::empty_strided(target.sizes(), target.strides(), values.options()).copy_(values), range);
  }
};

class FusedLoad {
 public:
  FusedLoad(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
            const FusedOptimizer& optimizer, bool is_shared)
      : stored_(stored),
        names_(names),
        places_(places),
        optimizer_(optimizer),
        is_shared_(is_shared),
        core_(*optimizer.core),
        reads_(stored) {}

  void run() {
    for (size_t b = 0; b < core_.block_count(); ++b) {
      const std::vector<memory::NamedTensor>& parameters = core_.contents(b).state->block->parameters();
      for (size_t p = 0; p < parameters.size(); ++p) place(b, p, parameters[p].tensor);
    }
    std::set<std::string> apart;
    for (const auto& [name, target] : newest_) {
      destinations_[kWeights].emplace_back(places_.sources().at(name).second, target);
      apart.insert(name);
    }
    for (const Converted& conversion : converted_) {
      std::erase_if(destinations_[kWeights], [&](const auto& own) { return own.first == conversion.in_file; });
      destinations_[kWeights].emplace_back(conversion.in_file, conversion.weight);
      for (const auto& [name, source] : places_.sources()) {
        if (source.second == conversion.in_file) apart.insert(name);
      }
    }
    for (const auto& [name, tensor] : reads_.whole_tensors()) destinations_[kOptimizer].emplace_back(name, tensor);
    places_.load(apart, std::move(destinations_));
    reads_.read();
    // One block at a time, as memory has no room for all. Whoever loads the checkpoint verifies the files.
    for (const auto& [block, own] : on_disk_) read_from_disk(block, own);
    for (Converted& conversion : converted_) conversion.finish();
    for (const auto& [saved, remainder] : other_remainders_) optim::convert_remainder(saved, remainder);
    core_.set_last_norm(stored_.last_norm());
    core_.accept_weights();
  }

 private:
  void place(size_t block, size_t index, const at::Tensor& parameter) {
    const std::string& name = *names_.find(parameter);
    const bool is_stored = places_.sources().contains(name);
    if (is_stored && stored_.section(kPrevious).contains(name)) {
      if (!next_weights_.contains(block)) next_weights_[block] = core_.load_next_weights(block);
      newest_[name] = next_weights_[block][index];
      destinations_[kPrevious].emplace_back(name, parameter.detach());
    }
    const int group = core_.block(block).group(index);
    if (group < 0 || !is_stored) return;
    std::optional<ElementsOf> range;
    if (is_shared_) {
      const optim::ElementRange shard = core_.block(block).shard(index);
      range = {shard.first, shard.last};
    }
    place_moments(block, index, parameter, range);
    Master master{index, parameter, range, nullptr};
    if (places_.dtype(name) != parameter.scalar_type()) {
      const std::string& in_file = places_.sources().at(name).second;
      const saving::StoredTensor& weights = stored_.section(kWeights).at(in_file);
      const at::Tensor target = newest_.contains(name) ? newest_[name] : parameter.detach();
      converted_.push_back({in_file, at::empty(weights.shape, weights.dtype), {}, target, {}, range});
      master.conversion = &converted_.back();
    }
    const at::Tensor& remainder = core_.block(block).remainder(index);
    if (remainder.defined() && remainder.is_meta()) {
      on_disk_[block].masters.push_back(master);
    } else {
      take_master(master, remainder, reads_);
    }
  }

  // A trained parameter that may have a master.
  struct Master {
    size_t index;
    at::Tensor parameter;
    std::optional<ElementsOf> range;
    Converted* conversion;  // null: the weights are in the checkpoint's dtype
  };

  // `remainder`: the model's, with its values.
  void take_master(const Master& master, const at::Tensor& remainder, StateReads& reads) {
    const std::string& name = *names_.find(master.parameter);
    const char* saved_rest = nullptr;
    for (const char* const kind : {kMaster, kMasterRemainder}) {
      if (stored_.parts().contains(concat(name, "/", kind))) saved_rest = kind;
    }
    if (master.conversion != nullptr) {
      master.conversion->remainder = remainder;
      if (saved_rest != nullptr)
        master.conversion->saved_rest = reads.whole(name, saved_rest, master.parameter.sizes());
    } else if (remainder.defined() && saved_rest != nullptr) {
      const at::Tensor taker = taker_of(remainder, concat(name, "/", saved_rest));
      reads.take(name, saved_rest, taker, master.parameter.detach(), master.range);
    }
  }

  // What takes the saved remainder: the model's own, if it is in the same format.
  at::Tensor taker_of(const at::Tensor& remainder, const std::string& key) {
    const c10::ScalarType saved = stored_.parts_of(key).front().tensor.dtype;
    const at::Tensor taker = saved == remainder.scalar_type() ? remainder : at::empty_like(remainder, saved);
    if (saved == remainder.scalar_type() || !is_remainder(remainder) || !is_remainder(taker)) return remainder;
    other_remainders_.emplace_back(taker, remainder);
    return taker;
  }

  // A trained parameter of a block whose state the checkpoint has.
  struct Moments {
    size_t index;
    at::Tensor parameter;
    std::optional<ElementsOf> range;
  };

  struct OnDisk {
    std::vector<Moments> moments;
    std::vector<Master> masters;
  };

  // REQUIRES: the weights have been read.
  void read_from_disk(size_t block, const OnDisk& own) {
    optim::BlockOptimizer& optimizer = core_.block(block);
    StateReads in_parts(stored_, /*in_parts=*/true);
    optim::BlockStates::Hold hold = take_moments(optimizer.states(), own.moments, block, in_parts);
    const size_t in_memory = other_remainders_.size();
    for (const Master& master : own.masters) take_master(master, optimizer.remainder(master.index, hold), in_parts);
    in_parts.read();
    for (const Master& master : own.masters) {
      if (master.conversion == nullptr) continue;
      master.conversion->finish();
      master.conversion->saved_rest.reset();
      master.conversion->remainder.reset();
    }
    for (size_t i = in_memory; i < other_remainders_.size(); ++i)
      optim::convert_remainder(other_remainders_[i].first, other_remainders_[i].second);
    other_remainders_.resize(in_memory);
  }

  void place_moments(size_t block, size_t index, const at::Tensor& parameter, const std::optional<ElementsOf>& range) {
    optim::BlockStates& states = core_.block(block).states();
    states.forget(index);
    const bool has_none = stored_.counters(*names_.find(parameter)) == nullptr;
    if (has_none || (range && own_elements(parameter.detach(), range).numel() == 0)) return;
    if (states.tier()) {
      on_disk_[block].moments.push_back({index, parameter, range});
    } else {
      take_moments(states, {{index, parameter, range}}, block, reads_);
    }
  }

  // Makes states, to be read by `reads`. They are in memory until what is returned is dropped.
  optim::BlockStates::Hold take_moments(optim::BlockStates& states, const std::vector<Moments>& moments, size_t block,
                                        StateReads& reads) {
    const auto options = [&](size_t index) {
      return optimizer_.options.at(static_cast<size_t>(core_.block(block).group(index)));
    };
    std::vector<size_t> fresh;
    for (const Moments& each : moments) fresh.push_back(each.index);
    optim::BlockStates::Hold hold = states.hold_to_change(fresh, [&](size_t index, const optim::MakeTensor& make) {
      const Moments& own = *std::ranges::find(moments, index, &Moments::index);
      return optim::make_state(optimizer_.algorithm, options(index), optimizer_.moments,
                               own_elements(own.parameter.detach(), own.range), make);
    });
    for (const Moments& each : moments) {
      const std::string& name = *names_.find(each.parameter);
      const nlohmann::json& counters = *stored_.counters(name);
      hold[each.index].scalars = {counters.at("step").get<double>(), counters.at("mu_product").get<double>(),
                                  counters.at("eta").get<double>(), counters.at("mu").get<double>()};
      const std::vector<std::string> kinds =
          optim::state_names(optimizer_.algorithm, options(each.index), optimizer_.moments, each.parameter.sizes());
      for (size_t i = 0; i < kinds.size(); ++i)
        reads.take(name, kinds[i], hold[each.index].tensors[i], each.parameter.detach(), each.range);
    }
    return hold;
  }

  const StoredCheckpoint& stored_;
  const ModelNames& names_;
  const WeightPlaces& places_;
  const FusedOptimizer& optimizer_;
  const bool is_shared_;
  runtime::ModelOptimizer& core_;
  StateReads reads_;
  StoredCheckpoint::Destinations destinations_;
  std::deque<Converted> converted_;                                  // which Master::conversion points to
  std::vector<std::pair<at::Tensor, at::Tensor>> other_remainders_;  // as saved, in another format, and the model's
  std::map<size_t, OnDisk> on_disk_;                                 // by block
  std::map<size_t, std::vector<at::Tensor>> next_weights_;           // by block
  std::map<std::string, at::Tensor> newest_;  // where weights after the last step go, if calls read those before
};

}  // namespace

void load_fused(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
                const FusedOptimizer& optimizer, bool is_shared) {
  FusedLoad(stored, names, places, optimizer, is_shared).run();
}

}  // namespace roundpipe
