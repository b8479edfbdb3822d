#include <roundpipe/runs/load_fused.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <roundpipe/core/error.h>
#include <roundpipe/optim/thread_pool.h>

namespace roundpipe {

namespace {

// A trained parameter whose dtype differs from the checkpoint's; its fp32 master stays the same.
struct Converted {
  std::string in_file;
  at::Tensor weight;      // takes the saved weights
  at::Tensor saved_rest;  // takes what their master has beyond them; undefined if nothing was saved
  at::Tensor target;      // the model's weights
  at::Tensor remainder;   // the model's; undefined for fp32

  void finish() const {
    const at::NoGradGuard no_grad;
    at::Tensor master = weight.to(at::kFloat);
    if (saved_rest.defined() && saved_rest.scalar_type() == at::kShort) {
      master = at::empty(weight.sizes(), at::kFloat);
      optim::join(weight, saved_rest, master, *optim::ThreadPool::current());
    } else if (saved_rest.defined()) {
      master = saved_rest;
    }
    if (remainder.defined() && remainder.scalar_type() == at::kShort) {
      const at::Tensor high = at::empty_like(master, at::kBFloat16), low = at::empty_like(master, at::kShort);
      optim::split(master, high, low, *optim::ThreadPool::current());
      target.copy_(high);
      remainder.copy_(low);
      return;
    }
    target.copy_(master);
    if (remainder.defined()) remainder.copy_(master);
  }
};

class FusedLoad {
 public:
  FusedLoad(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places, Optimizer& optimizer)
      : stored_(stored), names_(names), places_(places), optimizer_(optimizer), core_(*optimizer.core()) {}

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
    places_.load(apart, std::move(destinations_));
    for (const Converted& conversion : converted_) conversion.finish();
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
    place_moments(name, parameter, optimizer_.all_options().at(static_cast<size_t>(group)),
                  core_.block(block).state(index));
    const at::Tensor& remainder = core_.block(block).remainder(index);
    std::string saved_rest;
    for (const char* const kind : {kMasterRemainder, kMaster}) {
      if (stored_.section(kOptimizer).contains(concat(name, "/", kind))) saved_rest = concat(name, "/", kind);
    }
    if (places_.dtype(name) != parameter.scalar_type()) {
      convert(name, saved_rest, newest_.contains(name) ? newest_[name] : parameter.detach(), remainder);
    } else if (remainder.defined() && !saved_rest.empty()) {
      destinations_[kOptimizer].emplace_back(saved_rest, remainder);
    }
  }

  void place_moments(const std::string& name, const at::Tensor& parameter, const optim::Hyperparameters& options,
                     optim::ParameterState& state) {
    state = {};
    const nlohmann::json& counters = stored_.state().at("counters");
    if (!counters.contains(name)) return;
    state = optim::make_state(optimizer_.algorithm(), options, optimizer_.moments(), parameter);
    const nlohmann::json& own = counters.at(name);
    state.scalars = {own.at("step").get<double>(), own.at("mu_product").get<double>(), own.at("eta").get<double>(),
                     own.at("mu").get<double>()};
    const std::vector<std::string> moments =
        optim::state_names(optimizer_.algorithm(), options, optimizer_.moments(), parameter.sizes());
    for (size_t i = 0; i < moments.size(); ++i)
      destinations_[kOptimizer].emplace_back(concat(name, "/", moments[i]), state.tensors[i]);
  }

  void convert(const std::string& name, const std::string& saved_rest, const at::Tensor& target,
               const at::Tensor& remainder) {
    const std::string& in_file = places_.sources().at(name).second;
    const StoredTensor& weights = stored_.section(kWeights).at(in_file);
    Converted conversion{in_file, at::empty(weights.shape, weights.dtype), {}, target, remainder};
    if (!saved_rest.empty()) {
      const StoredTensor& rest = stored_.section(kOptimizer).at(saved_rest);
      conversion.saved_rest = at::empty(rest.shape, rest.dtype);
      destinations_[kOptimizer].emplace_back(saved_rest, conversion.saved_rest);
    }
    converted_.push_back(std::move(conversion));
  }

  const StoredCheckpoint& stored_;
  const ModelNames& names_;
  const WeightPlaces& places_;
  Optimizer& optimizer_;
  runtime::ModelOptimizer& core_;
  StoredCheckpoint::Destinations destinations_;
  std::vector<Converted> converted_;
  std::map<size_t, std::vector<at::Tensor>> next_weights_;  // by block
  std::map<std::string, at::Tensor> newest_;  // where weights after the last step go, if calls read those before
};

}  // namespace

void load_fused(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
                Optimizer& optimizer) {
  FusedLoad(stored, names, places, optimizer).run();
}

}  // namespace roundpipe
