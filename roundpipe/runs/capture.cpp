#include <roundpipe/runs/capture.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/memory/mapped_file.h>
#include <roundpipe/runs/optimizer_options.h>
#include <roundpipe/runs/torch_optimizer.h>
#include <roundpipe/runtime/engine.h>

namespace roundpipe {

using nlohmann::ordered_json;
using saving::Snapshot;

namespace {

std::string dtype_text(const at::Tensor& tensor) {
  std::string name(c10::toString(tensor.scalar_type()));
  if (name == "BFloat16") return "bfloat16";
  if (name == "Half") return "float16";
  if (name == "Float") return "float32";
  if (name == "Double") return "float64";
  std::ranges::transform(name, name.begin(), [](char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

// The CRC-32 of zlib.
uint32_t crc32(const void* data, size_t size, uint32_t crc) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value & 1U) != 0 ? 0xEDB88320U ^ value >> 1 : value >> 1;
      made[i] = value;
    }
    return made;
  }();
  crc = ~crc;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) crc = table[(crc ^ bytes[i]) & 255U] ^ crc >> 8;
  return ~crc;
}

at::Tensor state_of_default(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state_of_default(c10::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

int count_of(std::optional<c10::DeviceType> accelerator) {
  return accelerator ? static_cast<int>(at::accelerator::deviceCount()) : 0;
}

}  // namespace

std::string tuple_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += concat(i == 0 ? "" : ", ", sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

const char* moments_name(optim::MomentFormat moments) {
  return moments == optim::MomentFormat::kFloat32 ? "float32" : "8bit";
}

std::string sampled_checksum(const at::Tensor& tensor) {
  constexpr int64_t kSample_bytes = 4096;
  const at::Tensor flat = tensor.detach().reshape(-1);
  const int64_t size = flat.numel();
  const int64_t count = std::max<int64_t>(kSample_bytes / static_cast<int64_t>(tensor.element_size()), 1);
  const std::string head = concat(tuple_text(tensor.sizes()), " torch.", dtype_text(tensor));
  uint32_t crc = crc32(head.data(), head.size(), 0);
  const int64_t middle = std::max<int64_t>((size - count) / 2, 0);
  for (const int64_t begin : {int64_t{0}, middle, std::max<int64_t>(size - count, 0)}) {
    const at::Tensor part = flat.slice(0, begin, begin + count).contiguous();
    crc = crc32(part.const_data_ptr(), part.nbytes(), crc);
  }
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", crc);
  return text.data();
}

ModelNames::ModelNames(const HostWeights& model, const LeavesOut& leaves_out) {
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  for (const auto& [name, parameter] : model.parameter_names()) {
    const auto [found, is_new] = first.emplace(parameter.unsafeGetTensorImpl(), name);
    if (!is_new) {
      tied.emplace_back(name, found->second);
      continue;
    }
    parameters.emplace_back(name, parameter);
    if (parameter.requires_grad()) continue;
    if (memory::is_mapped(parameter) || (leaves_out && leaves_out(name, parameter))) outside.insert(name);
  }
  for (const auto& [name, buffer] : model.buffer_names()) {
    if (first.emplace(buffer.unsafeGetTensorImpl(), name).second) buffers.emplace_back(name, buffer);
  }
  note_parameters();
}

ModelNames::ModelNames(NamedParameters of_parameters, NamedParameters of_buffers, std::set<std::string> left_out,
                       std::map<std::string, std::string> names_in_file)
    : parameters(std::move(of_parameters)),
      buffers(std::move(of_buffers)),
      outside(std::move(left_out)),
      in_file(std::move(names_in_file)) {
  note_parameters();
}

void ModelNames::note_parameters() {
  for (size_t i = 0; i < parameters.size(); ++i) numbers_[parameters[i].second.unsafeGetTensorImpl()] = i;
}

const std::string* ModelNames::find(const at::Tensor& parameter) const {
  const auto found = numbers_.find(parameter.unsafeGetTensorImpl());
  return found == numbers_.end() ? nullptr : &parameters[found->second].first;
}

const std::string& ModelNames::file_name(const std::string& name) const {
  const auto found = in_file.find(name);
  return found == in_file.end() ? name : found->second;
}

std::optional<int64_t> chunk_logit_bytes(Model& model) {
  const std::optional<int64_t> own = model.run_options().chunk_logit_bytes;
  if (!own || *own > 0) return own;
  return chunk_logit_bytes(runtime::Engine::current()->worker(0).device().is_virtual());
}

Capture::Capture(Model& model, int64_t step, const LeavesOut& leaves_out) : names_(model, leaves_out) {
  const runtime::Pipeline& pipeline = *model.shared_pipeline();
  pipeline.wait_buffers();
  for (const auto& [name, buffer] : names_.buffers)
    contents_->add(kWeights, {name, buffer.detach().clone(), std::nullopt});
  const std::shared_ptr<runtime::Engine> pool = runtime::Engine::current();
  const int devices = pool->pool_size();
  state_["step"] = step;
  state_["steps"] = step;
  state_["versions"] = {{"roundpipe", ROUNDPIPE_VERSION}, {"torch", TORCH_VERSION}};
  state_["pipelines"] = {{"",
                          {{"calls", pipeline.calls()},
                           {"random_seed", pipeline.random_seed()},
                           {"num_microbatch", model.run_options().microbatches.value_or(default_microbatches(devices))},
                           {"chunk_logit_bytes", nullptr},
                           {"arithmetic", nullptr}}}};
  if (model.arithmetic()) state_["pipelines"][""]["arithmetic"] = arithmetic_name(*model.arithmetic());
  if (const std::optional<int64_t> bytes = chunk_logit_bytes(model))
    state_["pipelines"][""]["chunk_logit_bytes"] = *bytes;
  state_["devices"] = devices;
  state_["fp16_accumulation"] = pool->fp16_accumulation();
  state_["dtypes"] = ordered_json::object();
  state_["outside"] = ordered_json::object();
  state_["tied"] = ordered_json::object();
  for (const auto& [name, parameter] : names_.parameters) {
    state_["dtypes"][name] = dtype_text(parameter);
    if (names_.outside.contains(name)) state_["outside"][name] = sampled_checksum(parameter);
  }
  for (const auto& [name, first] : names_.tied) state_["tied"][name] = first;
  state_["random"] = contents_->encoder().encode(random_states(), "random");
  state_["state"] = ordered_json::object();
}

ordered_json Capture::groups_of(const std::vector<std::vector<std::string>>& names,
                                const std::vector<StateValue>& options) {
  ordered_json groups = ordered_json::array();
  for (size_t i = 0; i < options.size(); ++i) {
    groups.push_back({{"options", contents_->encoder().encode(options[i], concat("optimizer.param_groups[", i, "]"))},
                      {"params", names[i]}});
  }
  return groups;
}

void Capture::take(Optimizer& optimizer, const std::shared_ptr<saving::SnapshotMemory>& memory) {
  const std::shared_ptr<runtime::ModelOptimizer>& core = optimizer.core();
  std::vector<std::vector<std::string>> names(optimizer.all_options().size());
  std::set<std::string> covered;
  Contents::Places places;
  for (size_t b = 0; b < core->block_count(); ++b) {
    const runtime::ModelOptimizer::BlockContents contents = core->contents(b);
    const std::vector<memory::NamedTensor>& parameters = contents.state->block->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::string& name = *names_.find(parameters[p].tensor);
      Contents::PlaceNames& place = places[{b, p}] = {name, name, {}};
      if (contents.optimizer->trains_any()) covered.insert(name);
      const int group = contents.optimizer->group(p);
      if (group < 0) continue;
      names.at(static_cast<size_t>(group)).push_back(name);
      place.moments = optim::state_names(optimizer.algorithm(), optimizer.all_options().at(static_cast<size_t>(group)),
                                         optimizer.moments(), parameters[p].tensor.sizes());
    }
  }
  // Groups list their parameters in the model's order, as torch's optimizers do.
  for (std::vector<std::string>& group : names) {
    std::set<std::string> members(group.begin(), group.end());
    group.clear();
    for (const auto& [name, parameter] : names_.parameters) {
      if (members.contains(name)) group.push_back(name);
    }
  }
  std::vector<StateValue> options;
  std::vector<double> rates;
  const std::vector<double>& first_rates = optimizer.first_rates();
  for (size_t i = 0; i < names.size(); ++i) {
    const std::optional<double> first = first_rates.empty() ? std::nullopt : std::optional(first_rates[i]);
    options.push_back(options_dict(optimizer.algorithm(), optimizer.all_options()[i], first));
    rates.push_back(optimizer.all_options()[i].lr);
  }
  state_["steps"] = optimizer.steps();
  state_["optimizer"] = {{"class", class_name(optimizer.algorithm())},
                         {"moments", moments_name(optimizer.moments())},
                         {"param_groups", groups_of(names, options)}};
  if (!first_rates.empty()) {
    // What torch's LambdaLR keeps, whose rates are products of the same factors.
    StateValue::List base(first_rates.begin(), first_rates.end()), last(rates.begin(), rates.end());
    const StateValue scheduler = StateValue::dict({{"base_lrs", std::move(base)},
                                                   {"last_epoch", optimizer.steps()},
                                                   {"_step_count", optimizer.steps() + 1},
                                                   {"_last_lr", std::move(last)},
                                                   {"lr_lambdas", StateValue::List(first_rates.size())}});
    state_["lr_schedulers"] =
        ordered_json::array({{{"state_dict", contents_->encoder().encode(scheduler, "lr_schedulers[0]")}}});
  }
  contents_->set_snapshot(Snapshot::of(*core, memory, core), std::move(places));
  for (const auto& [name, parameter] : names_.parameters) {
    if (!covered.contains(name) && !names_.outside.contains(name))
      contents_->add(kWeights, {name, parameter.detach(), {}});
  }
  take_shown_gradients();
}

void Capture::take(torch::optim::Optimizer& optimizer) {
  const optim::Algorithm algorithm = algorithm_of(optimizer, "save_checkpoint");
  std::vector<std::vector<std::string>> names;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    names.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const std::string* const name = names_.find(parameter);
      if (name == nullptr) {
        throw std::invalid_argument(
            "[save_checkpoint] the optimizer steps a tensor that is no parameter of the model, expected the model's "
            "own; save other tensors as SaveOptions::state");
      }
      names.back().push_back(*name);
    }
  }
  std::vector<StateValue> options;
  for (const optim::Hyperparameters& group : options_of(optimizer))
    options.push_back(options_dict(algorithm, group, std::nullopt));
  state_["optimizer"] = {
      {"class", class_name(algorithm)},
      {"moments", kMomentsOfTorch},
      {"param_groups", groups_of(names, options)},
      {"state_dict", contents_->encoder().encode(state_of(optimizer), "optimizer", /*copies_tensors=*/false)}};
  take_weights();
}

void Capture::take_weights() {
  for (const auto& [name, parameter] : names_.parameters) {
    if (!names_.outside.contains(name)) contents_->add(kWeights, {name, parameter.detach(), {}});
  }
  take_shown_gradients();
}

void Capture::take_shown_gradients() {
  for (const auto& [name, parameter] : names_.parameters) {
    if (parameter.grad().defined()) contents_->add(kGradients, {name, parameter.grad().detach().clone(), {}});
  }
}

void Capture::take_scaler(const GradScaler& scaler) {
  scaler_ = scaler.later_state();
  scaler_options_ = scaler.options();
}

void Capture::take_values(const std::vector<std::pair<std::string, StateValue>>& values) {
  for (const auto& [name, value] : values) {
    if (state_["state"].contains(name)) {
      throw std::invalid_argument(
          concat("[save_checkpoint] the state has '", name, "' twice, expected each name once; rename one"));
    }
    state_["state"][name] = {{"value", contents_->encoder().encode(value, "state." + name)}};
  }
}

void Capture::finish() {
  if (scaler_) {
    const GradScaler::State scale = scaler_();
    const StateValue state = StateValue::dict({{"scale", scale.scale},
                                               {"growth_factor", scaler_options_.growth_factor},
                                               {"backoff_factor", scaler_options_.backoff_factor},
                                               {"growth_interval", scaler_options_.growth_interval},
                                               {"_growth_tracker", scale.growth_tracker}});
    const StateValue resume = StateValue::dict({{"front", scale.front}, {"updates_on_main", false}});
    state_["scaler"] = contents_->encoder().encode(StateValue::dict({{"state", state}, {"resume", resume}}), "scaler");
  }
  if (contents_->snapshot() != nullptr) state_["counters"] = contents_->take_snapshot().counters;
  contents_->set_states(state_, nullptr, /*compact=*/true);
}

StateValue random_states() {
  std::vector<std::pair<std::string, StateValue>> states{{"torch", state_of_default(c10::kCPU)}};
  const std::optional<c10::DeviceType> accelerator = at::accelerator::getAccelerator(false);
  if (const int count = count_of(accelerator); count > 0) {
    StateValue::List of_devices;
    for (int i = 0; i < count; ++i)
      of_devices.emplace_back(state_of_default({*accelerator, static_cast<c10::DeviceIndex>(i)}));
    states.emplace_back("devices", std::move(of_devices));
  }
  return StateValue::dict(std::move(states));
}

void check_random_states(const StateValue& states) {
  try {
    at::detail::createCPUGenerator().set_state(states.at("torch").as_tensor());
    if (const StateValue* const of_devices = states.find("devices")) {
      for (const StateValue& state : of_devices->items()) state.as_tensor();
    }
  } catch (const std::exception& wrong) {  // c10::Error has more than a line
    const std::string text = wrong.what();
    throw Error(concat("[load_checkpoint] random: no state of a generator: ", text.substr(0, text.find('\n'))));
  }
}

void restore_random_states(const StateValue& states) {
  set_state_of_default(c10::kCPU, states.at("torch").as_tensor());
  const StateValue* const of_devices = states.find("devices");
  const std::optional<c10::DeviceType> accelerator = at::accelerator::getAccelerator(false);
  if (of_devices == nullptr) return;
  for (int i = 0; i < count_of(accelerator) && static_cast<size_t>(i) < of_devices->items().size(); ++i) {
    set_state_of_default({*accelerator, static_cast<c10::DeviceIndex>(i)},
                         of_devices->items()[static_cast<size_t>(i)].as_tensor());
  }
}

}  // namespace roundpipe
