#include <roundpipe/ops/linear_cross_entropy.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/ops/wide_product.h>
#include <roundpipe/torch_compat/autocast.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe::ops {

namespace {

using Kind = LogitStep::Kind;

template <typename... Parts>
[[noreturn]] void refuse_loss(const Parts&... parts) {
  throw std::invalid_argument(concat("[linear_cross_entropy] ", parts...));
}

// --- Checks ---

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_steps(const std::vector<LogitStep>& steps) {
  for (const LogitStep& step : steps) {
    if (step.kind != Kind::kMultiply && step.kind != Kind::kDivide) continue;
    if (!std::isfinite(step.value)) {
      refuse_loss("a step has the factor ", step.value, ", expected a finite number; leave the step out or correct it");
    }
    if (step.kind == Kind::kDivide && step.value == 0) {
      refuse_loss("a step divides the logits by 0, expected another number; leave the step out or correct it");
    }
  }
}

void check_shapes(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const at::Tensor& labels) {
  if (hidden.dim() < 1) refuse_loss("hidden has no dimensions, expected [..., width]; pass one row for each token");
  if (weight.dim() != 2 || weight.size(0) == 0) {
    refuse_loss("weight has shape ", weight.sizes(), ", expected [vocabulary, width] with at least one row");
  }
  if (hidden.size(-1) != weight.size(1)) {
    refuse_loss("hidden has shape ", hidden.sizes(), " and weight ", weight.sizes(),
                ", expected the same width at the end of both");
  }
  if (bias && (bias->dim() != 1 || bias->size(0) != weight.size(0))) {
    refuse_loss("bias has shape ", bias->sizes(), ", expected [", weight.size(0),
                "], one number for each row of weight");
  }
  if (labels.sizes() != hidden.sizes().slice(0, static_cast<size_t>(hidden.dim() - 1))) {
    refuse_loss("labels have shape ", labels.sizes(), " and hidden ", hidden.sizes(),
                ", expected one label for each token; labels need hidden's shape without its last dimension");
  }
}

void check_labels(const at::Tensor& labels, int64_t vocabulary, int64_t ignore_index) {
  if (labels.scalar_type() != at::kLong) {
    refuse_loss("labels have dtype ", labels.scalar_type(), ", expected Long (int64); cast them");
  }
  if (!labels.is_cpu()) return;
  const at::Tensor in_range = at::logical_and(labels.ge(0), labels.lt(vocabulary));
  const at::Tensor wrong = labels.masked_select(at::logical_or(in_range, labels.eq(ignore_index)).logical_not());
  if (wrong.numel() > 0) {
    refuse_loss("a label is ", wrong[0].item<int64_t>(), ", expected 0 to ", vocabulary - 1,
                " or ignore_index, which is ", ignore_index, "; correct the labels or pass another ignore_index");
  }
}

void check_devices(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const at::Tensor& labels) {
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.device() != hidden.device()) {
      refuse_loss(name, " is on ", tensor.device(), " and hidden on ", hidden.device(),
                  ", expected one device for all; move one of them");
    }
  };
  check("weight", weight);
  if (bias) check("bias", *bias);
  check("labels", labels);
}

// The dtype of the projection. Like autocast for linear, this leaves fp64 alone.
at::ScalarType projection_dtype(const at::Tensor& hidden, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias) {
  const auto check = [&](const char* name, at::ScalarType dtype) {
    if (!is_supported(dtype)) refuse_loss(name, " has dtype ", dtype, ", expected fp64, fp32, bf16 or fp16; cast it");
  };
  check("hidden", hidden.scalar_type());
  check("weight", weight.scalar_type());
  if (bias) check("bias", bias->scalar_type());
  const bool any_double = hidden.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble ||
                          (bias && bias->scalar_type() == at::kDouble);
  const c10::DeviceType device = hidden.device().type();
  if (!any_double && torch_compat::autocasts(device)) return at::autocast::get_autocast_dtype(device);
  if (weight.scalar_type() != hidden.scalar_type() || (bias && bias->scalar_type() != hidden.scalar_type())) {
    refuse_loss("hidden has dtype ", hidden.scalar_type(), ", weight ", weight.scalar_type(), " and bias ",
                bias ? c10::toString(bias->scalar_type()) : "none", ", expected the same; cast them or use autocast");
  }
  return hidden.scalar_type();
}

// --- Computation ---

// The work of a call: which gradients to compute, and in which chunks.
struct Work {
  LinearCrossEntropyOptions options;
  at::ScalarType dtype = at::kFloat;  // of the projection
  int64_t chunk_tokens = 0;
  bool hidden_gradient = false;
  bool weight_gradient = false;
  bool bias_gradient = false;
  bool is_fused = false;
  // [tokens, 1], in the softmax's dtype: the gradient of each token's loss. Undefined: 1.
  at::Tensor token_gradients;

  bool any_gradient() const { return hidden_gradient || weight_gradient || bias_gradient; }
  at::ScalarType softmax_dtype() const { return dtype == at::kDouble ? at::kDouble : at::kFloat; }
};

struct Gradients {
  at::Tensor hidden, weight, bias;
};

int64_t ceil_div(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

int64_t chunk_length(int64_t tokens, const at::Tensor& weight, const LinearCrossEntropyOptions& options) {
  const int64_t asked = options.chunk_tokens;
  if (asked < 0) refuse_loss("chunk_tokens is ", asked, ", expected at least 1, or 0 to leave the choice open");
  if (options.chunk_logit_bytes < 0) {
    refuse_loss("chunk_logit_bytes is ", options.chunk_logit_bytes,
                ", expected at least 1, or 0 to leave the choice open");
  }
  const int64_t limit_bytes =
      options.chunk_logit_bytes > 0 ? options.chunk_logit_bytes : roundpipe::chunk_logit_bytes(weight.is_cpu());
  const int64_t fitting = limit_bytes / (weight.size(0) * static_cast<int64_t>(sizeof(float)));
  const int64_t shortest = std::clamp<int64_t>(weight.size(1) / 4, 128, 256);
  const int64_t longest = asked > 0 ? asked : std::clamp<int64_t>(fitting, shortest, 4096);
  if (tokens <= longest) return tokens;
  return ceil_div(tokens, ceil_div(tokens, longest));
}

// One call: the buffers that all chunks use in turn, and the sums over chunks.
class ChunkedHead {
 public:
  // hidden [tokens, width], labels [tokens].
  ChunkedHead(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
              const at::Tensor& labels, const Work& work)
      : work_(work),
        hidden_(hidden),
        weight_(weight.to(work.dtype)),
        labels_(labels),
        token_losses_(at::empty({hidden.size(0)}, hidden.options().dtype(work.softmax_dtype()))) {
    if (bias) bias_ = bias->to(work.dtype);
    const bool one_chunk = hidden.size(0) <= work.chunk_tokens;
    if (hidden.size(0) > 0) allocate_buffers();
    if (work.hidden_gradient) gradients.hidden = at::empty(hidden.sizes(), hidden.options());
    if (work.bias_gradient) gradients.bias = at::zeros(bias_.sizes(), token_losses_.options());
    if (work.weight_gradient) {
      // The product of a single chunk is rounded only once anyway.
      const bool rounded = one_chunk && weight.scalar_type() == work.dtype;
      const auto options = weight.options().dtype(rounded ? work.dtype : work.softmax_dtype());
      gradients.weight = hidden.size(0) > 0 ? at::empty(weight.sizes(), options) : at::zeros(weight.sizes(), options);
    }
  }

  void run() {
    for (int64_t begin = 0; begin < hidden_.size(0); begin += work_.chunk_tokens) {
      run_chunk(begin, std::min(work_.chunk_tokens, hidden_.size(0) - begin));
    }
    logits_ = softmax_ = at::Tensor();
    tanh_.clear();
  }

  const at::Tensor& token_losses() const { return token_losses_; }

  Gradients gradients;

 private:
  void allocate_buffers() {
    const std::vector<int64_t> shape{work_.chunk_tokens, weight_.size(0)};
    logits_ = at::empty(shape, weight_.options());
    const bool has_one = work_.softmax_dtype() == work_.dtype || (work_.is_fused && work_.options.steps.empty());
    softmax_ = has_one ? logits_ : at::empty(shape, token_losses_.options());
    at::ScalarType dtype = work_.dtype;
    for (const LogitStep& step : work_.options.steps) {
      if (step.kind == Kind::kFloat32) dtype = work_.softmax_dtype();
      if (step.kind == Kind::kMultiply) scale_ *= step.value;
      if (step.kind == Kind::kDivide) scale_ /= step.value;
      if (step.kind == Kind::kTanh && work_.any_gradient()) {
        tanh_.push_back(at::empty(shape, weight_.options().dtype(dtype)));
      }
    }
  }

  void run_chunk(int64_t begin, int64_t count) {
    const at::Tensor hidden = hidden_.narrow(0, begin, count).to(work_.dtype);
    const at::Tensor labels = labels_.narrow(0, begin, count);
    if (work_.is_fused) return run_fused(hidden, labels, begin, count);
    const at::Tensor ignored = labels.eq(work_.options.ignore_index);
    const at::Tensor label = labels.masked_fill(ignored, 0).unsqueeze(1);

    project(hidden);
    const at::Tensor probabilities = apply_steps(count);
    log_softmax_in_place(probabilities);
    const at::Tensor log_probability = probabilities.gather(1, label);
    token_losses_.narrow(0, begin, count).copy_(log_probability.neg().squeeze(1).masked_fill_(ignored, 0));
    if (!work_.any_gradient()) return;

    // The gradient of the sum: softmax - 1 at the label, softmax elsewhere. Ignored rows are not cleared here but
    // masked out of the products below, which are smaller.
    probabilities.exp_();
    probabilities.scatter_(1, label, log_probability.expm1());
    weigh(probabilities, begin, count);
    const at::Tensor gradient = undo_steps(count);
    const at::Tensor ignored_rows = ignored.unsqueeze(1);
    if (work_.hidden_gradient) add_hidden_gradient(gradient, begin, count).masked_fill_(ignored_rows, 0);
    if (work_.bias_gradient) add_bias_gradient(gradient.masked_fill_(ignored_rows, 0));
    if (work_.weight_gradient) add_weight_gradient(gradient, hidden.masked_fill(ignored_rows, 0), begin == 0);
  }

  // Likewise, where one kernel leaves the gradient in the logits' place, 0 for ignored rows.
  void run_fused(const at::Tensor& hidden, const at::Tensor& labels, int64_t begin, int64_t count) {
    project(hidden);
    at::Tensor logits = apply_steps(count);
    token_losses_.narrow(0, begin, count)
        .copy_(kernels::cross_entropy_(logits, labels, work_.options.ignore_index, work_.any_gradient()));
    if (!work_.any_gradient()) return;
    weigh(logits, begin, count);
    const at::Tensor gradient = undo_steps(count);
    if (work_.hidden_gradient) add_hidden_gradient(gradient, begin, count);
    if (work_.bias_gradient) add_bias_gradient(gradient);
    if (work_.weight_gradient) add_weight_gradient(gradient, hidden, begin == 0);
  }

  void weigh(const at::Tensor& gradient, int64_t begin, int64_t count) const {
    if (work_.token_gradients.defined()) gradient.mul_(work_.token_gradients.narrow(0, begin, count));
  }

  void project(const at::Tensor& hidden) {
    at::Tensor logits = logits_.narrow(0, 0, hidden.size(0));
    if (bias_.defined()) {
      at::addmm_out(logits, bias_, hidden, weight_.t());
    } else {
      at::mm_out(logits, hidden, weight_.t());
    }
  }

  // Applies the steps to the first `count` rows of the buffers. The result lies in softmax_.
  at::Tensor apply_steps(int64_t count) {
    at::Tensor logits = logits_.narrow(0, 0, count);
    at::Tensor softmax = softmax_.narrow(0, 0, count);
    at::Tensor current = logits;
    size_t saved = 0;
    for (const LogitStep& step : work_.options.steps) {
      at::Tensor& working = current.scalar_type() == work_.dtype ? logits : softmax;
      if (step.kind == Kind::kFloat32) {
        if (current.scalar_type() == work_.softmax_dtype()) continue;
        softmax.copy_(current);
        current = softmax;
      } else if (step.kind == Kind::kTanh) {
        at::Tensor out = work_.any_gradient() ? tanh_[saved++].narrow(0, 0, count) : working;
        at::tanh_out(out, current);
        current = out;
      } else {
        const at::Tensor factor = at::native::wrapped_scalar_tensor(step.value);
        if (step.kind == Kind::kMultiply) {
          at::mul_out(working, current, factor);
        } else {
          at::div_out(working, current, factor);
        }
        current = working;
      }
    }
    if (current.data_ptr() != softmax.data_ptr()) softmax.copy_(current);
    return softmax;
  }

  // Turns the gradient of the steps' result (in softmax_) into that of the logits (in logits_), without the steps'
  // factors: the products apply them before they round.
  at::Tensor undo_steps(int64_t count) {
    at::Tensor logits = logits_.narrow(0, 0, count);
    at::Tensor current = softmax_.narrow(0, 0, count);
    const auto to_logits = [&] {
      if (current.scalar_type() == work_.dtype) return;
      logits.copy_(current);
      current = logits;
    };
    for (size_t saved = tanh_.size(); saved-- > 0;) {
      const at::Tensor tanh = tanh_[saved].narrow(0, 0, count);
      if (tanh.scalar_type() == work_.dtype) to_logits();
      at::tanh_backward_out(current, current, tanh);
    }
    to_logits();
    return current;
  }

  at::Tensor add_hidden_gradient(const at::Tensor& gradient, int64_t begin, int64_t count) {
    at::Tensor rows = gradients.hidden.narrow(0, begin, count);
    at::Tensor product = rows.scalar_type() == work_.dtype ? rows : at::empty(rows.sizes(), weight_.options());
    at::addmm_out(product, product, gradient, weight_, 0, scale_);
    if (!product.is_same(rows)) rows.copy_(product);
    return rows;
  }

  void add_bias_gradient(const at::Tensor& gradient) {
    gradients.bias.add_(gradient.sum(0, false, work_.softmax_dtype()), scale_);
  }

  void add_weight_gradient(const at::Tensor& gradient, const at::Tensor& hidden, bool first) {
    if (gradients.weight.scalar_type() == work_.dtype) {
      at::addmm_out(gradients.weight, gradients.weight, gradient.t(), hidden, first ? 0 : 1, scale_);
      return;
    }
    // 16-bit products are added in fp32, some rows of the vocabulary at a time, with the softmax's buffer as scratch.
    // Each block takes a quarter of the buffer, because the CPU's mixed addition makes an fp32 copy.
    const int64_t width = weight_.size(1), vocabulary = weight_.size(0);
    if (width == 0) return;
    if (work_.is_fused) {
      add_wide_product(gradients.weight, gradient.t(), hidden, scale_, softmax_.numel() / 2, !first);
      return;
    }
    const int64_t block = std::clamp<int64_t>(softmax_.numel() / (4 * width), 1, vocabulary);
    at::Tensor scratch = softmax_.flatten().view(work_.dtype);
    if (scratch.numel() < block * width) scratch = at::empty({block * width}, weight_.options());
    for (int64_t row = 0; row < vocabulary; row += block) {
      const int64_t rows = std::min(block, vocabulary - row);
      at::Tensor product = scratch.narrow(0, 0, rows * width).view({rows, width});
      at::addmm_out(product, product, gradient.narrow(1, row, rows).t(), hidden, 0, scale_);
      at::Tensor sum = gradients.weight.narrow(0, row, rows);
      if (first) {
        sum.copy_(product);
      } else {
        sum.add_(product);
      }
    }
  }

  static void log_softmax_in_place(const at::Tensor& logits) {
    at::Tensor out = logits;
    // These two backends read a row before they write it. Others may not.
    if (logits.is_cpu() || logits.is_cuda()) {
      at::_log_softmax_out(out, logits, 1, /*half_to_float=*/false);
    } else {
      out.copy_(at::_log_softmax(logits, 1, /*half_to_float=*/false));
    }
  }

  const Work& work_;
  const at::Tensor hidden_;
  const at::Tensor weight_;
  const at::Tensor labels_;
  const at::Tensor token_losses_;
  at::Tensor bias_;
  double scale_ = 1;              // the combined factor of all kMultiply and kDivide
  at::Tensor logits_;             // [chunk, vocabulary], in the projection's dtype
  at::Tensor softmax_;            // [chunk, vocabulary], in the softmax's dtype; the same as logits_ if that is equal
  std::vector<at::Tensor> tanh_;  // the result of each tanh, for its gradient
};

// --- Autograd ---

// `gradient` *= `scale`, in fp32 even if the gradient has 16 bits. The CPU does this for a scalar. Other devices first
// round a tensor without dimensions to the gradient's dtype, but not one with dimensions.
void scale_in_place(const at::Tensor& gradient, const at::Tensor& scale) {
  if (scale.is_cpu()) {
    if (scale.item<double>() != 1) gradient.mul_(scale);
  } else {
    gradient.mul_(scale.reshape(std::vector<int64_t>(static_cast<size_t>(gradient.dim()), 1)));
  }
}

[[noreturn]] void refuse_second_derivative() {
  refuse_loss(
      "the backward pass was asked for a graph of its own, which it has none of; leave create_graph out, or use "
      "linear and cross_entropy for second derivatives");
}

constexpr const char* kWork = "work";
constexpr const char* kHidden = "hidden";
constexpr const char* kWeight = "weight";
constexpr const char* kBias = "bias";
constexpr const char* kConsumer = "consumer";
constexpr const char* kUnused = "unused";  // present until the gradients are handed out

struct LinearCrossEntropyFunction : public torch::autograd::Function<LinearCrossEntropyFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                                                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                                const at::Tensor& labels, const Work& work) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    ChunkedHead head(hidden, weight, bias, labels, work);
    head.run();
    // Not saved as variables: the backward pass hands the gradients out, so nobody else may hold them.
    const auto keep = [&](const char* name, at::Tensor& gradient, const at::Tensor& input, bool wide = false) {
      if (gradient.defined()) context->saved_data[name] = wide ? gradient : gradient.to(input.scalar_type());
      gradient.reset();
    };
    keep(kHidden, head.gradients.hidden, hidden);
    // A sum in fp32 goes on as one, where somebody takes it.
    c10::intrusive_ptr<torch_compat::GradientConsumer> consumer;
    if (work.is_fused && work.options.sums_products) consumer = torch_compat::consumer_of(weight);
    if (consumer) context->saved_data[kConsumer] = c10::IValue::make_capsule(consumer);
    keep(kWeight, head.gradients.weight, weight, static_cast<bool>(consumer));
    if (bias) keep(kBias, head.gradients.bias, *bias);
    context->saved_data[kUnused] = true;
    context->mark_non_differentiable({head.token_losses()});
    return {head.token_losses().sum(), head.token_losses()};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list output_gradients) {
    if (at::GradMode::is_enabled()) refuse_second_derivative();
    const auto unused = context->saved_data.find(kUnused);
    if (unused == context->saved_data.end()) {
      refuse_loss(
          "the backward pass ran a second time, but gave its gradients away the first time; pass retain_graph the "
          "first time, or compute the loss again");
    }
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    if (!keep) context->saved_data.erase(unused);
    const auto take = [&](const char* name) {
      const auto found = context->saved_data.find(name);
      if (found == context->saved_data.end()) return at::Tensor();
      at::Tensor gradient = found->second.toTensor();
      if (keep) {
        gradient = gradient.clone();
      } else {
        context->saved_data.erase(found);
      }
      scale_in_place(gradient, output_gradients[0]);
      return gradient;
    };
    at::Tensor of_weight = take(kWeight);
    if (const auto found = context->saved_data.find(kConsumer); found != context->saved_data.end()) {
      const auto consumer =
          c10::static_intrusive_pointer_cast<torch_compat::GradientConsumer>(found->second.toCapsule());
      if (of_weight.defined() && consumer->add_wide(of_weight)) of_weight.reset();
    }
    return {take(kHidden), of_weight, take(kBias), at::Tensor(), at::Tensor()};
  }
};

// The losses of tokens, each with a gradient of its own, which only the backward pass knows: it computes the logits
// again.
struct TokenLossesFunction : public torch::autograd::Function<TokenLossesFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                            const Work& work) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Work losses = work;
    losses.hidden_gradient = losses.weight_gradient = losses.bias_gradient = false;
    ChunkedHead head(hidden, weight, bias, labels, losses);
    head.run();
    context->save_for_backward({hidden, weight, bias.value_or(at::Tensor()), labels});
    context->saved_data[kWork] = c10::IValue::make_capsule(c10::make_intrusive<SavedWork>(work));
    return head.token_losses();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list output_gradients) {
    if (at::GradMode::is_enabled()) refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[0];
    const at::Tensor& weight = saved[1];
    const std::optional<at::Tensor> bias = saved[2].defined() ? std::optional(saved[2]) : std::nullopt;
    Work work = c10::static_intrusive_pointer_cast<SavedWork>(context->saved_data[kWork].toCapsule())->work;
    work.token_gradients = output_gradients[0].unsqueeze(1);
    ChunkedHead head(hidden, weight, bias, saved[3], work);
    head.run();
    const auto as = [](const at::Tensor& gradient, const at::Tensor& input) {
      return gradient.defined() ? gradient.to(input.scalar_type()) : at::Tensor();
    };
    return {as(head.gradients.hidden, hidden), as(head.gradients.weight, weight),
            bias ? as(head.gradients.bias, *bias) : at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  struct SavedWork : public torch::CustomClassHolder {
    explicit SavedWork(Work saved) : work(std::move(saved)) {}
    Work work;
  };
};

}  // namespace

std::vector<LogitStep> softcap_steps(double cap) {
  if (!(cap > 0) || !std::isfinite(cap)) {
    refuse_loss("softcap is ", cap, ", expected a positive number; leave it out for logits without a limit");
  }
  return {{Kind::kDivide, cap}, {Kind::kTanh}, {Kind::kMultiply, cap}};
}

namespace {

// The arguments of a call, checked.
struct Checked {
  at::Tensor hidden, labels;  // [tokens, width], [tokens]
  std::optional<at::Tensor> bias;
  Work work;
};

Checked checked(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                const at::Tensor& labels, const LinearCrossEntropyOptions& options) {
  Checked call;
  call.bias = bias && bias->defined() ? bias : std::nullopt;
  check_shapes(hidden, weight, call.bias, labels);
  check_devices(hidden, weight, call.bias, labels);
  check_steps(options.steps);
  call.labels = labels.reshape({-1});
  check_labels(call.labels, weight.size(0), options.ignore_index);
  Work& work = call.work;
  work.options = options;
  work.dtype = projection_dtype(hidden, weight, call.bias);
  call.hidden = hidden.reshape({call.labels.size(0), hidden.size(-1)});
  work.is_fused = options.arithmetic == Arithmetic::kFast && work.dtype != at::kDouble;
  // The kernel computes in fp32 anyway.
  const auto widens = [](const LogitStep& step) { return step.kind == Kind::kFloat32; };
  if (work.is_fused && std::ranges::all_of(work.options.steps, widens)) work.options.steps.clear();
  work.chunk_tokens = chunk_length(call.hidden.size(0), weight, options);
  if (at::GradMode::is_enabled()) {
    work.hidden_gradient = call.hidden.requires_grad();
    work.weight_gradient = weight.requires_grad();
    work.bias_gradient = call.bias && call.bias->requires_grad();
  }
  return call;
}

}  // namespace

LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options) {
  const Checked call = checked(hidden, weight, bias, labels, options);
  const auto outputs = LinearCrossEntropyFunction::apply(call.hidden, weight, call.bias, call.labels, call.work);
  return {outputs[0], options.token_losses ? outputs[1].reshape(labels.sizes()) : at::Tensor()};
}

at::Tensor linear_cross_entropy_of_tokens(const at::Tensor& hidden, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                                          const LinearCrossEntropyOptions& options) {
  const Checked call = checked(hidden, weight, bias, labels, options);
  return TokenLossesFunction::apply(call.hidden, weight, call.bias, call.labels, call.work).reshape(labels.sizes());
}

}  // namespace roundpipe::ops
