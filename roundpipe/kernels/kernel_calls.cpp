#include <roundpipe/kernels/kernel_calls.h>

#include <algorithm>
#include <bit>
#include <set>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/launcher.h>
#include <roundpipe/kernels/plain_forms.h>
#include <roundpipe/kernels/host_sets.inl>

namespace roundpipe::kernels {

using at::Tensor;

namespace {

constexpr int kPiece = kMostLanes * kVector;  // elements of an item where rows have no meaning
constexpr Int64 kMostParts = 1024;            // partial sums of a norm's weight

template <typename... Parts>
[[noreturn]] void refuse(const char* where, const Parts&... parts) {
  throw std::invalid_argument(concat("[", where, "] ", parts...));
}

// Calls run(T()) for the kernels' type of the dtype.
template <typename Run>
void for_dtype(const char* where, at::ScalarType dtype, Run&& run) {
  if (dtype == at::kBFloat16) return run(BFloat16());
  if (dtype == at::kHalf) return run(Float16());
  if (dtype == at::kFloat) return run(float());
  refuse(where, "the dtype is ", dtype, ", expected bf16, fp16 or fp32");
}

template <typename T>
const T* read_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* write_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Lanes of a team for rows of this width, a power of two.
int lanes_for(Int64 width) {
  const auto vectors = static_cast<unsigned>(std::max<Int64>(1, (width + kVector - 1) / kVector));
  return static_cast<int>(std::min<unsigned>(kMostLanes, std::bit_ceil(vectors)));
}

// Whether all vectors of contiguous rows lie at multiples of their size.
bool are_aligned(Int64 width, std::initializer_list<const Tensor*> tensors) {
  return width % kVector == 0 && std::ranges::all_of(tensors, [](const Tensor* tensor) {
           constexpr std::uintptr_t kAlignment = 16;
           return !tensor->defined() || reinterpret_cast<std::uintptr_t>(tensor->const_data_ptr()) % kAlignment == 0;
         });
}

template <typename Kernel>
void run_kernel(const Kernel& kernel, const Tensor& beside) {
  run(entry_of<Kernel>(), &kernel, beside.device());
}

// Whether torch's own operators compute: where no kernels run. Warns once for each reason.
bool falls_back(const Tensor& tensor) {
  const std::string why = why_no_kernels(tensor.device());
  if (why.empty()) return false;
  static Mutex mutex;
  static std::set<std::string> said;  // protected by mutex
  const bool is_new = [&] {
    const MutexLock lock(mutex);
    return said.insert(why).second;
  }();
  if (is_new) {
    const std::string notice = concat("[kernels] fused operators run by torch's own on ", tensor.device(),
                                      ", which takes longer and more memory, and may round otherwise: ", why);
    if (!frontend().warn(notice)) TORCH_WARN(notice);
  }
  return true;
}

// The same. Refuses dtypes that the kernels do not know, wherever they run.
bool falls_back(const char* where, const Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  for_dtype(where, tensor.scalar_type(), [](auto) {});
  return falls_back(tensor);
}

// A kernel over rows of a width, one or more of them an item.
template <typename Kernel>
Kernel over_rows(Int64 items, Int64 width) {
  Kernel kernel{};
  kernel.items = items;
  kernel.width = static_cast<int>(width);
  kernel.lanes = lanes_for(width);
  return kernel;
}

// A kernel over elements that have no rows.
template <typename Kernel>
Kernel over_pieces(Int64 all, Int64 piece = kPiece) {
  Kernel kernel = over_rows<Kernel>((all + piece - 1) / piece, piece);
  kernel.all = all;
  return kernel;
}

bool has_values(const Tensor& tensor) { return !tensor.is_meta() && tensor.numel() > 0; }

void check_device(const char* where, const Tensor& a, const Tensor& b) {
  if (a.device() == b.device()) return;
  refuse(where, "got tensors on ", a.device(), " and ", b.device(), ", expected one device; move one of them");
}

void check_norm(const Tensor& input, const Tensor& weight) {
  constexpr const char* kWhere = "rms_norm";
  check_device(kWhere, input, weight);
  if (input.dim() < 1 || weight.dim() != 1 || input.size(-1) != weight.size(0)) {
    refuse(kWhere, "the input has shape ", input.sizes(), " and the weight ", weight.sizes(),
           ", expected [..., width] and [width]");
  }
  if (input.size(-1) > kWidestNorm) {
    refuse(kWhere, "rows have ", input.size(-1), " numbers, expected at most ", kWidestNorm);
  }
  if (weight.scalar_type() != input.scalar_type() && weight.scalar_type() != at::kFloat) {
    refuse(kWhere, "the weight is ", weight.scalar_type(), " and the input ", input.scalar_type(),
           ", expected the same or fp32");
  }
}

void check_same(const char* where, const Tensor& a, const Tensor& b) {
  check_device(where, a, b);
  if (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type()) return;
  refuse(where, "got ", a.scalar_type(), " ", a.sizes(), " and ", b.scalar_type(), " ", b.sizes(),
         ", expected one dtype and shape");
}

Int64 rows_of(const Tensor& tensor) { return tensor.size(-1) == 0 ? 0 : tensor.numel() / tensor.size(-1); }

// Calls run(T(), W()) for the dtypes of a norm's rows and weight.
template <typename Run>
void for_norm(const Tensor& input, const Tensor& weight, Run&& run) {
  for_dtype("rms_norm", input.scalar_type(), [&](auto type) {
    if (weight.scalar_type() == input.scalar_type()) {
      run(type, type);
    } else {
      run(type, float());
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& given, const std::optional<Tensor>& added, const Tensor& by,
                                        double eps) {
  check_norm(given, by);
  if (added) check_same("add_rms_norm", given, *added);
  if (falls_back("rms_norm", given)) return plain::norm(given, added, by, eps);
  const Tensor input = given.contiguous(), weight = by.contiguous();
  const Tensor residual = added ? added->contiguous() : Tensor();
  const Tensor normed = at::empty(input.sizes(), input.options());
  const Tensor sum = added ? at::empty(input.sizes(), input.options()) : at::empty({0}, input.options());
  const Tensor scales = at::empty({rows_of(input)}, input.options().dtype(at::kFloat));
  if (!has_values(input)) return {sum, normed, scales};
  for_norm(input, weight, [&]<typename T, typename W>(T, W) {
    auto kernel = over_rows<RmsNorm<T, W>>(scales.size(0), input.size(-1));
    kernel.aligned = are_aligned(kernel.width, {&input, &residual, &weight, &sum, &normed});
    kernel.eps = static_cast<float>(eps);
    kernel.input = read_of<T>(input);
    kernel.residual = added ? read_of<T>(residual) : nullptr;
    kernel.weight = read_of<W>(weight);
    kernel.sum = write_of<T>(sum);
    kernel.normed = write_of<T>(normed);
    kernel.scales = write_of<float>(scales);
    run_kernel(kernel, input);
  });
  return {sum, normed, scales};
}

std::tuple<Tensor, Tensor> norm_backward(const Tensor& normed_gradient, const std::optional<Tensor>& sum_gradient,
                                         const Tensor& given, const Tensor& by, const Tensor& scales,
                                         bool weight_trains) {
  check_norm(given, by);
  check_same("rms_norm", given, normed_gradient);
  if (sum_gradient) check_same("add_rms_norm", given, *sum_gradient);
  check_device("rms_norm", given, scales);
  if (scales.scalar_type() != at::kFloat || scales.dim() != 1 || scales.size(0) != rows_of(given)) {
    refuse("rms_norm", "the scales are ", scales.scalar_type(), " ", scales.sizes(), ", expected fp32 [",
           rows_of(given), "]");
  }
  if (falls_back("rms_norm", given))
    return plain::norm_backward(normed_gradient, sum_gradient, given, by, scales, weight_trains);
  const Tensor input = given.contiguous(), weight = by.contiguous(), g = normed_gradient.contiguous();
  const Tensor more = sum_gradient ? sum_gradient->contiguous() : Tensor();
  const Tensor gradient = at::empty(input.sizes(), input.options());
  const Tensor sums = at::empty(weight_trains ? weight.sizes() : at::IntArrayRef{0}, weight.options());
  if (!has_values(input)) return {gradient, sums.zero_()};
  for_norm(input, weight, [&]<typename T, typename W>(T, W) {
    const Int64 rows = scales.size(0), rows_of_item = (rows + kMostParts - 1) / kMostParts;
    auto kernel = over_rows<RmsNormBackward<T, W>>((rows + rows_of_item - 1) / rows_of_item, input.size(-1));
    kernel.all_rows = rows;
    kernel.rows_of_item = static_cast<int>(rows_of_item);
    kernel.aligned = are_aligned(kernel.width, {&input, &weight, &g, &more, &gradient});
    kernel.normed_gradient = read_of<T>(g);
    kernel.sum_gradient = sum_gradient ? read_of<T>(more) : nullptr;
    kernel.input = read_of<T>(input);
    kernel.weight = read_of<W>(weight);
    kernel.scales = read_of<float>(scales);
    kernel.gradient = write_of<T>(gradient);
    Tensor parts;
    if (weight_trains) {
      parts = at::empty({kernel.items, kernel.width}, scales.options());
      kernel.weight_parts = write_of<float>(parts);
    }
    run_kernel(kernel, input);
    if (!weight_trains) return;
    auto sum = over_pieces<ColumnSum<W>>(kernel.width);
    sum.all_rows = static_cast<int>(kernel.items);
    sum.parts = read_of<float>(parts);
    sum.sums = write_of<W>(sums);
    run_kernel(sum, input);
  });
  return {gradient, sums};
}

Tensor turn(const Tensor& given, const Tensor& given_cos, const Tensor& given_sin, bool backward) {
  constexpr const char* kWhere = "rotary";
  constexpr int64_t kDims = 4;
  if (given.dim() != kDims || given.size(3) % 2 != 0) {
    refuse(kWhere, "the states have shape ", given.sizes(), ", expected [rows, tokens, heads, an even width]");
  }
  const int64_t rows = given.size(0), tokens = given.size(1), heads = given.size(2), width = given.size(3);
  check_device(kWhere, given, given_cos);
  check_same(kWhere, given_cos, given_sin);
  const bool whole = given_cos.dim() == 3 && given_cos.size(2) == width;
  if (given_cos.dim() != 3 || (given_cos.size(0) != 1 && given_cos.size(0) != rows) || given_cos.size(1) != tokens ||
      (!whole && 2 * given_cos.size(2) != width) || given_cos.scalar_type() != given.scalar_type()) {
    refuse(kWhere, "the tables are ", given_cos.scalar_type(), " ", given_cos.sizes(), ", expected ",
           given.scalar_type(), " [", rows, " or 1, ", tokens, ", ", width, " or ", width / 2, "]");
  }
  if (falls_back(kWhere, given)) return plain::turn(given, given_cos, given_sin, backward);
  const Tensor states = given.contiguous(), cos = given_cos.contiguous(), sin = given_sin.contiguous();
  const Tensor turned = at::empty(states.sizes(), states.options());
  if (!has_values(states)) return turned;
  for_dtype(kWhere, states.scalar_type(), [&]<typename T>(T) {
    auto kernel = over_rows<Rotary<T>>(rows * tokens, heads * (width / 2));
    kernel.half = static_cast<int>(width / 2);
    kernel.aligned = are_aligned(kernel.half, {&states, &cos, &sin, &turned});
    kernel.table_tokens = cos.size(0) * tokens;
    kernel.whole_tables = whole;
    kernel.backward = backward;
    kernel.states = read_of<T>(states);
    kernel.cos = read_of<T>(cos);
    kernel.sin = read_of<T>(sin);
    kernel.turned = write_of<T>(turned);
    run_kernel(kernel, states);
  });
  return turned;
}

// How gate and up lie in one tensor or two.
struct GateLayout {
  Int64 rows, width, pitch;  // rows 0: elements have none
  int step;
  Int64 up;  // where it begins, in a tensor that has both
};

// `first`: the gate, or both, whose halves they are, or which alternate if they are bounded.
GateLayout layout_of(const Tensor& first, bool has_up, bool alternates) {
  if (has_up) return {0, 0, kPiece, 1, 0};
  if (alternates) return {0, 0, Int64{2} * kPiece, 2, 1};
  const Int64 both = first.size(-1);
  return {both == 0 ? 0 : first.numel() / both, both / 2, both, 1, both / 2};
}

// What both directions of a gate set.
template <typename Kernel>
Kernel gate_kernel(Int64 all, const GateLayout& layout, std::optional<double> alpha, double limit) {
  auto kernel = layout.rows > 0 ? over_rows<Kernel>(layout.rows, layout.width) : over_pieces<Kernel>(all);
  kernel.pitch = layout.pitch;
  kernel.step = layout.step;
  kernel.form = {alpha.has_value(), static_cast<float>(alpha.value_or(1)), static_cast<float>(limit)};
  return kernel;
}

// The shape of the result.
std::vector<int64_t> checked_gate(const Tensor& given, const std::optional<Tensor>& up, bool is_clamped) {
  std::vector<int64_t> shape = given.sizes().vec();
  if (up) {
    check_same("silu_gate", given, *up);
    return shape;
  }
  if (shape.empty() || shape.back() % 2 != 0) {
    refuse(is_clamped ? "clamped_gate" : "silu_gate", "the input has shape ", given.sizes(),
           ", expected an even last dimension");
  }
  shape.back() /= 2;
  return shape;
}

Tensor gate(const Tensor& given, const std::optional<Tensor>& given_up, std::optional<double> alpha, double limit) {
  const std::vector<int64_t> shape = checked_gate(given, given_up, alpha.has_value());
  if (falls_back("gate", given)) return plain::gate(given, given_up, alpha, limit);
  const Tensor first = given.contiguous(), up = given_up ? given_up->contiguous() : Tensor();
  const Tensor result = at::empty(shape, first.options());
  if (!has_values(result)) return result;
  const GateLayout layout = layout_of(first, given_up.has_value(), alpha.has_value());
  for_dtype("gate", first.scalar_type(), [&]<typename T>(T) {
    auto kernel = gate_kernel<Gate<T>>(result.numel(), layout, alpha, limit);
    kernel.aligned = are_aligned(kernel.width, {&first, &up, &result});
    kernel.gate = read_of<T>(first);
    kernel.up = given_up ? read_of<T>(up) : kernel.gate + layout.up;
    kernel.result = write_of<T>(result);
    run_kernel(kernel, first);
  });
  return result;
}

std::tuple<Tensor, Tensor> gate_backward(const Tensor& given_gradient, const Tensor& given,
                                         const std::optional<Tensor>& given_up, std::optional<double> alpha,
                                         double limit) {
  check_device("gate", given_gradient, given);
  if (given_gradient.sizes() != checked_gate(given, given_up, alpha.has_value()) ||
      given_gradient.scalar_type() != given.scalar_type()) {
    refuse("gate", "the gradient is ", given_gradient.scalar_type(), " ", given_gradient.sizes(), " for ",
           given.scalar_type(), " ", given.sizes(), ", expected that of the result");
  }
  if (falls_back("gate", given)) return plain::gate_backward(given_gradient, given, given_up, alpha, limit);
  const Tensor gradient = given_gradient.contiguous(), first = given.contiguous();
  const Tensor up = given_up ? given_up->contiguous() : Tensor();
  const Tensor of_gate = at::empty(first.sizes(), first.options());
  const Tensor of_up = given_up ? at::empty(up.sizes(), up.options()) : at::empty({0}, first.options());
  if (!has_values(gradient)) return {of_gate, of_up};
  const GateLayout layout = layout_of(first, given_up.has_value(), alpha.has_value());
  for_dtype("gate", first.scalar_type(), [&]<typename T>(T) {
    auto kernel = gate_kernel<GateBackward<T>>(gradient.numel(), layout, alpha, limit);
    kernel.aligned = are_aligned(kernel.width, {&gradient, &first, &up, &of_gate, &of_up});
    kernel.gradient = read_of<T>(gradient);
    kernel.gate = read_of<T>(first);
    kernel.up = given_up ? read_of<T>(up) : kernel.gate + layout.up;
    kernel.gate_gradient = write_of<T>(of_gate);
    kernel.up_gradient = given_up ? write_of<T>(of_up) : kernel.gate_gradient + layout.up;
    run_kernel(kernel, first);
  });
  return {of_gate, of_up};
}

Tensor token_losses(Tensor& logits, const Tensor& given_labels, int64_t ignore_index, bool writes_gradient) {
  constexpr const char* kWhere = "cross_entropy_";
  if (logits.dim() != 2 || logits.size(1) == 0 || !logits.is_contiguous() || given_labels.dim() != 1 ||
      given_labels.size(0) != logits.size(0) || given_labels.scalar_type() != at::kLong) {
    refuse(kWhere, "got logits ", logits.sizes(), " and ", given_labels.scalar_type(), " labels ", given_labels.sizes(),
           ", expected contiguous [tokens, vocabulary], of one at least, and int64 [tokens]");
  }
  check_device(kWhere, logits, given_labels);
  if (writes_gradient) logits.unsafeGetTensorImpl()->bump_version();
  if (falls_back(kWhere, logits)) return plain::token_losses(logits, given_labels, ignore_index, writes_gradient);
  const Tensor labels = given_labels.contiguous();
  const Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  if (!has_values(logits)) return losses;
  for_dtype(kWhere, logits.scalar_type(), [&]<typename T>(T) {
    auto kernel = over_rows<CrossEntropy<T>>(logits.size(0), logits.size(1));
    kernel.aligned = are_aligned(kernel.width, {&logits});
    kernel.writes = writes_gradient;
    kernel.ignored = ignore_index;
    kernel.logits = write_of<T>(logits);
    kernel.labels = reinterpret_cast<const Int64*>(labels.const_data_ptr<int64_t>());
    kernel.losses = write_of<float>(losses);
    run_kernel(kernel, logits);
  });
  return losses;
}

Tensor& add_to(Tensor& sums, const Tensor& addends) {
  if (sums.scalar_type() != at::kFloat || sums.sizes() != addends.sizes() || !sums.is_contiguous() ||
      !addends.is_contiguous()) {
    refuse("add_wide_", "got ", sums.scalar_type(), " ", sums.sizes(), " and ", addends.sizes(),
           ", expected contiguous fp32 sums and contiguous addends of one shape");
  }
  check_device("add_wide_", sums, addends);
  sums.unsafeGetTensorImpl()->bump_version();
  if (falls_back("add_wide_", addends)) {
    plain::add_to(sums, addends);
    return sums;
  }
  if (!has_values(sums)) return sums;
  for_dtype("add_wide_", addends.scalar_type(), [&]<typename T>(T) {
    auto kernel = over_pieces<WideSum<T>>(sums.numel());
    kernel.aligned = are_aligned(kPiece, {&sums, &addends});
    kernel.sums = write_of<float>(sums);
    kernel.addends = read_of<T>(addends);
    run_kernel(kernel, sums);
  });
  return sums;
}

// Calls run(Form()) for the kernels' type of this form.
template <typename Run>
void for_form(const char* where, std::string_view form, Run&& run) {
  if (form == "nf4") return run(Nf4());
  if (form == "mxfp4") return run(Mxfp4());
  if (form == "int4") return run(Int4());
  if (form == "int8") return run(Int8());
  if (form == "fp8") return run(Fp8());
  refuse(where, "the form is '", form, "', expected nf4, mxfp4, int4, int8 or fp8");
}

template <typename Form>
constexpr at::ScalarType kCodes = Form::kInByte == 1 ? at::kChar : at::kByte;
template <typename Form>
constexpr at::ScalarType kScales = std::is_same_v<typename Form::Scale, float> ? at::kFloat : at::kByte;

// The number of blocks.
Int64 checked_blocks(const char* where, Int64 all, Int64 width, Int64 block) {
  constexpr Int64 kMost = 1 << 16;
  const bool is_row = block == width && width > 0;
  if (!is_row && (block < kVector || block > kMost || !std::has_single_bit(static_cast<std::uint64_t>(block)))) {
    refuse(where, "a block has ", block, " numbers, expected those of a row, or a power of two from ", kVector, " to ",
           kMost);
  }
  return (all + block - 1) / block;
}

Tensor decode_numbers(const Tensor& given_codes, const Tensor& given_scales, std::string_view form, int64_t block,
                      at::ScalarType dtype) {
  constexpr const char* kWhere = "decode";
  check_device(kWhere, given_codes, given_scales);
  Tensor numbers;
  for_form(kWhere, form, [&]<typename Form>(Form) {
    if (given_codes.dim() < 1 || given_codes.scalar_type() != kCodes<Form> ||
        given_scales.scalar_type() != kScales<Form>) {
      refuse(kWhere, "got codes ", given_codes.scalar_type(), " ", given_codes.sizes(), " and scales ",
             given_scales.scalar_type(), ", expected ", kCodes<Form>, " of one dimension at least and ", kScales<Form>);
    }
    std::vector<int64_t> sizes = given_codes.sizes().vec();
    sizes.back() *= Form::kInByte;
    const Int64 all = given_codes.numel() * Form::kInByte, blocks = checked_blocks(kWhere, all, sizes.back(), block);
    if (given_scales.numel() != blocks) {
      refuse(kWhere, "there are ", given_scales.numel(), " scales for ", all, " numbers, expected ", blocks,
             ": one for ", block, " of them");
    }
    for_dtype(kWhere, dtype, [&]<typename T>(T) {
      const Tensor codes = given_codes.contiguous(), scales = given_scales.contiguous();
      numbers = at::empty(sizes, codes.options().dtype(dtype));
      if (!has_values(numbers)) return;
      if (falls_back(numbers)) return plain::decode(codes, scales, form, block, numbers);
      auto kernel = block == sizes.back() ? over_rows<Decode<Form, T>>(blocks, block)
                                          : over_pieces<Decode<Form, T>>(all, std::max<Int64>(kPiece, block));
      kernel.aligned = are_aligned(kernel.width, {&codes, &numbers});
      constexpr int kNoShift = 31;
      const bool is_row = block == sizes.back();
      kernel.scales_of_item = is_row ? 1 : static_cast<int>(kernel.width / block);
      kernel.shift = is_row ? kNoShift : std::countr_zero(static_cast<std::uint64_t>(block));
      kernel.codes = static_cast<const unsigned char*>(codes.const_data_ptr());
      kernel.scales = read_of<typename Form::Scale>(scales);
      kernel.values = write_of<T>(numbers);
      run_kernel(kernel, numbers);
    });
  });
  return numbers;
}

std::tuple<Tensor, Tensor> encode_numbers(const Tensor& given, std::string_view form, int64_t block) {
  constexpr const char* kWhere = "encode";
  Tensor codes, scales;
  for_form(kWhere, form, [&]<typename Form>(Form) {
    if (given.dim() < 1 || given.size(-1) % Form::kInByte != 0) {
      refuse(kWhere, "the numbers have shape ", given.sizes(), ", expected a last dimension that is a multiple of ",
             Form::kInByte);
    }
    for_dtype(kWhere, given.scalar_type(), [&]<typename T>(T) {
      const Int64 blocks = checked_blocks(kWhere, given.numel(), given.size(-1), block);
      const Tensor numbers = given.contiguous();
      std::vector<int64_t> sizes = numbers.sizes().vec();
      sizes.back() /= Form::kInByte;
      codes = at::empty(sizes, numbers.options().dtype(kCodes<Form>));
      scales = at::empty({blocks}, numbers.options().dtype(kScales<Form>));
      if (!has_values(numbers)) return;
      if (falls_back(numbers)) {  // once for each weight, so that it may take its time
        const auto [on_host, their_scales] = encode_numbers(numbers.cpu(), form, block);
        codes.copy_(on_host);
        scales.copy_(their_scales);
        return;
      }
      auto kernel = over_rows<Encode<Form, T>>(blocks, block);
      kernel.all = numbers.numel();
      kernel.aligned = are_aligned(kernel.width, {&numbers});
      kernel.values = read_of<T>(numbers);
      kernel.codes = static_cast<unsigned char*>(codes.mutable_data_ptr());
      kernel.scales = write_of<typename Form::Scale>(scales);
      run_kernel(kernel, numbers);
    });
  });
  return {codes, scales};
}

}  // namespace

void add_kernel_calls(torch::Library& library) {
  library.impl("_rms_norm", norm);
  library.impl("_rms_norm_backward", norm_backward);
  library.impl("_rotary", turn);
  library.impl("_gate", gate);
  library.impl("_gate_backward", gate_backward);
  library.impl("cross_entropy_", token_losses);
  library.impl("add_wide_", add_to);
  library.impl("decode", decode_numbers);
  library.impl("encode", encode_numbers);
}

}  // namespace roundpipe::kernels
