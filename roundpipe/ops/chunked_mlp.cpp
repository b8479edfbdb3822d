#include <roundpipe/ops/chunked_mlp.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/torch_compat/autocast.h>
#include <roundpipe/torch_compat/own_generators.h>

namespace roundpipe::ops {

namespace {

template <typename... Parts>
[[noreturn]] void refuse_mlp(const Parts&... parts) {
  throw std::invalid_argument(concat("[chunked_mlp] ", parts...));
}

// --- State of the thread and of the generators ---

class AutocastState {
 public:
  // The state of this thread, for the host and for `device`.
  explicit AutocastState(c10::DeviceType device) {
    add(c10::DeviceType::CPU);
    if (device != c10::DeviceType::CPU && at::autocast::is_autocast_available(device)) add(device);
  }

  void set() const {
    for (const Entry& entry : entries_) {
      at::autocast::set_autocast_enabled(entry.device, entry.enabled);
      at::autocast::set_autocast_dtype(entry.device, entry.dtype);
    }
  }

 private:
  struct Entry {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  void add(c10::DeviceType device) {
    entries_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }

  std::vector<Entry> entries_;
};

// As long as it lives, this thread has the autocast state `state`, without autocast's cache.
class AutocastScope {
 public:
  AutocastScope(const AutocastState& state, c10::DeviceType device)
      : before_(device), cached_before_(at::autocast::is_autocast_cache_enabled()) {
    state.set();
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastScope() {
    before_.set();
    at::autocast::set_autocast_cache_enabled(cached_before_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const AutocastState before_;
  const bool cached_before_;
};

// The generators that a body on `device` may draw from.
std::vector<at::Generator> generators_of(c10::Device device) {
  std::vector<at::Generator> generators{torch_compat::OwnGenerators::drawn_from(c10::kCPU)};
  if (!device.is_cpu() && !device.is_meta()) generators.push_back(torch_compat::OwnGenerators::drawn_from(device));
  return generators;
}

std::vector<at::Tensor> states_of(const std::vector<at::Generator>& generators) {
  std::vector<at::Tensor> states;
  for (at::Generator generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void set_states(const std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states) {
  for (size_t index = 0; index < generators.size(); ++index) {
    at::Generator generator = generators[index];
    const std::lock_guard lock(generator.mutex());
    generator.set_state(states[index]);
  }
}

bool same_states(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const at::Tensor& one, const at::Tensor& other) { return at::equal(one, other); });
}

// As long as it lives, the generators continue from `states`; afterwards, from where they were. Without states, it does
// nothing.
class GeneratorScope {
 public:
  GeneratorScope(c10::Device device, const std::vector<at::Tensor>& states) {
    if (states.empty()) return;
    generators_ = generators_of(device);
    before_ = states_of(generators_);
    set_states(generators_, states);
  }
  ~GeneratorScope() { set_states(generators_, before_); }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> before_;
};

// --- Chunks ---

// The data that the backward pass needs besides saved tensors.
struct MapState : torch::CustomClassHolder {
  MapState(TokenwiseBody map_body, std::vector<at::Tensor> map_parameters, const ChunkedMapOptions& options,
           int64_t dimension, c10::Device input_device)
      : body(std::move(map_body)),
        body_of_backward(options.unread_body ? options.unread_body : body),
        parameters(std::move(map_parameters)),
        chunk_tokens(options.chunk_tokens),
        dim(dimension),
        preserve_rng_state(options.preserve_rng_state),
        device(input_device),
        autocast(input_device.type()) {
    // Autocast chooses the dtype of the result.
    if (!preserve_rng_state && !torch_compat::autocasts(device.type())) unread_width = options.unread_width;
  }

  const TokenwiseBody body;
  const TokenwiseBody body_of_backward;
  // The tensor objects that the body uses; saved variables may be other objects.
  std::vector<at::Tensor> parameters;
  const int64_t chunk_tokens;
  const int64_t dim;  // from the end, negative
  const bool preserve_rng_state;
  const c10::Device device;
  const AutocastState autocast;
  std::optional<int64_t> unread_width;                    // set: the forward does not run
  std::vector<std::vector<at::Tensor>> generator_states;  // by chunk; empty if the body drew nothing

  int64_t count_from(const at::Tensor& input, int64_t begin) const {
    return std::min(chunk_tokens, input.size(dim) - begin);
  }
};

// Runs the body on every chunk, without recording.
at::Tensor map_chunks(MapState& state, const at::Tensor& input) {
  const c10::DeviceType device = state.device.type();
  const AutocastScope autocast(state.autocast, device);
  const std::vector<at::Generator> generators =
      state.preserve_rng_state ? generators_of(state.device) : std::vector<at::Generator>();
  std::vector<at::Tensor> before = states_of(generators);
  const int64_t tokens = input.size(state.dim);
  at::Tensor output;
  for (int64_t begin = 0; begin < tokens; begin += state.chunk_tokens) {
    const int64_t count = state.count_from(input, begin);
    const at::Tensor part = state.body(input.narrow(state.dim, begin, count));
    if (!part.defined() || part.dim() < -state.dim || part.size(state.dim) != count) {
      refuse_mlp("the body made a tensor of shape ", part.defined() ? part.sizes() : at::IntArrayRef(), " of ", count,
                 " tokens in dimension ", state.dim,
                 ", expected as many tokens there; it has to map each token by itself");
    }
    if (!output.defined()) {
      std::vector<int64_t> shape = part.sizes().vec();
      shape[shape.size() - static_cast<size_t>(-state.dim)] = tokens;
      output = at::empty(shape, part.options());
    }
    output.narrow(state.dim, begin, count).copy_(part);
    if (state.preserve_rng_state) {
      std::vector<at::Tensor> after = states_of(generators);
      const bool drew = !same_states(before, after);
      state.generator_states.push_back(drew ? std::move(before) : std::vector<at::Tensor>());
      before = std::move(after);
    }
  }
  return output;
}

// The sum of one parameter's gradients over chunks.
class GradientSum {
 public:
  explicit GradientSum(at::ScalarType dtype) : dtype_(dtype) {}

  void add(const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    if (sum_.defined()) {
      sum_.add_(gradient);
      return;
    }
    const bool small = gradient.scalar_type() == at::kBFloat16 || gradient.scalar_type() == at::kHalf;
    // Later gradients are added into it, so nobody else may hold it.
    const bool ours = gradient.use_count() == 1 && gradient.storage().use_count() == 1 && gradient.is_contiguous();
    sum_ = small ? gradient.to(at::kFloat) : ours ? gradient : gradient.clone(at::MemoryFormat::Contiguous);
  }

  // Undefined if nothing was added.
  at::Tensor rounded() const { return sum_.defined() ? sum_.to(dtype_) : sum_; }

 private:
  const at::ScalarType dtype_;
  at::Tensor sum_;
};

struct ChunkedMapFunction : public torch::autograd::Function<ChunkedMapFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            at::TensorList parameters, const c10::intrusive_ptr<MapState>& state) {
    // Saving the parameters makes autograd notice in-place changes before the backward pass.
    torch::autograd::variable_list saved{input};
    saved.insert(saved.end(), parameters.begin(), parameters.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return state->unread_width ? without_values(input, *state->unread_width) : map_chunks(*state, input);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list output_gradients) {
    if (at::GradMode::is_enabled()) {
      refuse_mlp(
          "the backward pass was asked for a graph of its own, which it has none of; leave create_graph out, or call "
          "the body directly for second derivatives");
    }
    const auto state = c10::static_intrusive_pointer_cast<MapState>(context->saved_data["state"].toCapsule());
    const at::Tensor input = context->get_saved_variables()[0].detach();
    const at::Tensor& output_gradient = output_gradients[0];
    const bool needs_input = context->needs_input_grad(0);

    std::vector<size_t> trained;
    std::vector<GradientSum> sums;
    for (size_t index = 0; index < state->parameters.size(); ++index) {
      if (!context->needs_input_grad(index + 1)) continue;
      trained.push_back(index);
      sums.emplace_back(state->parameters[index].scalar_type());
    }
    at::Tensor input_gradient;
    if (needs_input) input_gradient = at::empty(input.sizes(), input.options());

    int64_t chunk = 0;
    for (int64_t begin = 0; begin < input.size(state->dim); begin += state->chunk_tokens, ++chunk) {
      const int64_t count = state->count_from(input, begin);
      const at::Tensor part = input.narrow(state->dim, begin, count).detach().requires_grad_(needs_input);
      std::vector<at::Tensor> wanted;
      if (needs_input) wanted.push_back(part);
      for (const size_t index : trained) wanted.push_back(state->parameters[index]);
      std::vector<at::Tensor> found =
          chunk_gradients(*state, chunk, part, output_gradient.narrow(state->dim, begin, count), wanted);
      for (size_t index = trained.size(); index-- > 0;) {
        at::Tensor gradient = std::move(found.back());
        found.pop_back();
        sums[index].add(gradient);
      }
      if (!needs_input) continue;
      at::Tensor target = input_gradient.narrow(state->dim, begin, count);
      if (found[0].defined()) {
        target.copy_(found[0]);
      } else {
        target.zero_();
      }
    }

    torch::autograd::variable_list gradients(state->parameters.size() + 2);
    gradients[0] = input_gradient;
    for (size_t index = 0; index < trained.size(); ++index) gradients[trained[index] + 1] = sums[index].rounded();
    return gradients;
  }

 private:
  static std::vector<at::Tensor> chunk_gradients(const MapState& state, int64_t chunk, const at::Tensor& part,
                                                 const at::Tensor& output_gradient,
                                                 const std::vector<at::Tensor>& wanted) {
    at::Tensor output;
    {
      const at::AutoGradMode record(true);
      const AutocastScope autocast(state.autocast, state.device.type());
      const GeneratorScope generators(state.device, state.preserve_rng_state
                                                        ? state.generator_states[static_cast<size_t>(chunk)]
                                                        : std::vector<at::Tensor>());
      output = state.body_of_backward(part);
    }
    if (!output.requires_grad()) return std::vector<at::Tensor>(wanted.size());
    return torch::autograd::grad({output}, wanted, {output_gradient}, /*retain_graph=*/false, /*create_graph=*/false,
                                 /*allow_unused=*/true);
  }
};

// `body_of(is_read)`: the body, whose result somebody reads or not. `projections`: all that it uses, the last one last.
template <typename BodyOf>
at::Tensor map_if_asked(const BodyOf& body_of, const at::Tensor& input,
                        std::initializer_list<const Projection*> projections, int64_t chunk_tokens, bool is_read) {
  if (chunk_tokens == 0) return body_of(is_read)(input);
  std::vector<at::Tensor> parameters;
  bool draws = false;
  for (const Projection* projection : projections) {
    for (at::Tensor& parameter : parameters_of(*projection)) parameters.push_back(std::move(parameter));
    draws = draws || draws_numbers(*projection);
  }
  ChunkedMapOptions options{.chunk_tokens = chunk_tokens, .preserve_rng_state = draws};
  if (!is_read) options.unread_width = (*std::prev(projections.end()))->weight.size(0);
  options.unread_body = body_of(false);
  return chunked_map(body_of(is_read), input, parameters, options);
}

}  // namespace

at::Tensor chunked_map(const TokenwiseBody& body, const at::Tensor& input, const std::vector<at::Tensor>& parameters,
                       const ChunkedMapOptions& options) {
  if (options.chunk_tokens < 1) {
    refuse_mlp("chunk_tokens is ", options.chunk_tokens, ", expected at least 1; a few hundred keep a device busy");
  }
  const int64_t dimensions = input.dim();
  if (options.dim < -dimensions || options.dim >= dimensions) {
    refuse_mlp("dimension ", options.dim, " holds the tokens, but the input has shape ", input.sizes(),
               "; pass a tensor [..., tokens, width] or another dimension");
  }
  const int64_t dim = options.dim < 0 ? options.dim : options.dim - dimensions;
  if (input.size(dim) <= options.chunk_tokens) return body(input);

  const auto state = c10::make_intrusive<MapState>(body, parameters, options, dim, input.device());
  const auto needs = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  if (!at::GradMode::is_enabled() || (!needs(input) && std::none_of(parameters.begin(), parameters.end(), needs))) {
    return map_chunks(*state, input);
  }
  return ChunkedMapFunction::apply(input, at::TensorList(parameters), state);
}

Activation parse_activation(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  refuse_mlp("the activation is '", name, "', expected one of silu, gelu, gelu_tanh and relu");
}

at::Tensor activate(const at::Tensor& input, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(input);
    case Activation::kGelu:
      return at::gelu(input);
    case Activation::kGeluTanh:
      return at::gelu(input, "tanh");
    case Activation::kRelu:
      return at::relu(input);
  }
  throw Error(concat("[chunked_mlp] there is no activation with the number ", static_cast<int>(activation)));
}

at::Tensor activated_product(const at::Tensor& gate, const std::optional<at::Tensor>& up, Activation activation,
                             Arithmetic arithmetic) {
  const bool alike = !up || (up->scalar_type() == gate.scalar_type() && up->sizes() == gate.sizes());
  if (arithmetic == Arithmetic::kFast && activation == Activation::kSilu && alike &&
      kernels::takes(gate.scalar_type())) {
    return kernels::silu_gate(gate, up);
  }
  if (up) return activate(gate, activation).mul(*up);
  const std::vector<at::Tensor> halves = gate.chunk(2, -1);
  return activate(halves[0], activation).mul(halves[1]);
}

at::Tensor gated_mlp(const at::Tensor& input, const Projection& gate, const Projection& up, const Projection& down,
                     Activation activation, int64_t chunk_tokens, bool is_read, Arithmetic arithmetic) {
  // A chunk of several rows is not contiguous, and the bits of an adapter's gradients depend on that.
  const bool adapted = gate.adapter || up.adapter || down.adapter;
  // Gradients of chunks are summed by chunked_map.
  const bool sums = arithmetic == Arithmetic::kFast && chunk_tokens == 0;
  const auto body_of = [=](bool read) -> TokenwiseBody {
    return [=](const at::Tensor& given) {
      const at::Tensor tokens = adapted ? given.contiguous() : given;
      const ProjectionUse inner{.sums_products = sums};
      const at::Tensor gates = project(tokens, gate, inner);
      const at::Tensor ups = project(tokens, up, inner);
      const ProjectionUse last{.is_read = read, .sums_products = sums};
      return project(activated_product(gates, ups, activation, arithmetic), down, last);
    };
  };
  return map_if_asked(body_of, input, {&gate, &up, &down}, chunk_tokens, is_read);
}

at::Tensor two_layer_mlp(const at::Tensor& input, const Projection& up, const Projection& down, Activation activation,
                         int64_t chunk_tokens) {
  const auto body_of = [=](bool read) -> TokenwiseBody {
    return [=](const at::Tensor& tokens) {
      return project(activate(project(tokens, up), activation), down, {.is_read = read});
    };
  };
  return map_if_asked(body_of, input, {&up, &down}, chunk_tokens, /*is_read=*/true);
}

}  // namespace roundpipe::ops
