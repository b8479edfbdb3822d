#include <roundpipe/ops/grouped_product.h>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/ops/encoded_product.h>

namespace roundpipe::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// A matrix inside of a tensor, which moves from group to group.
class Window {
 public:
  // REQUIRES: dispatch below autograd.
  explicit Window(const Tensor& whole) : whole_(whole), view_(at::alias(whole)) {}

  Tensor& rows(int64_t begin, int64_t count) {
    return show(begin, {count, whole_.size(1)}, {whole_.stride(0), whole_.stride(1)});
  }
  Tensor& transposed_rows(int64_t begin, int64_t count) {
    return show(begin, {whole_.size(1), count}, {whole_.stride(1), whole_.stride(0)});
  }
  Tensor& matrix(int64_t index) {
    return show(index, {whole_.size(1), whole_.size(2)}, {whole_.stride(1), whole_.stride(2)});
  }
  Tensor& transposed_matrix(int64_t index) {
    return show(index, {whole_.size(2), whole_.size(1)}, {whole_.stride(2), whole_.stride(1)});
  }

 private:
  Tensor& show(int64_t place, at::IntArrayRef sizes, at::IntArrayRef strides) {
    // Bypasses the dispatcher, whose views take longer than a small product.
    view_.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                       whole_.storage_offset() + place * whole_.stride(0));
    return view_;
  }

  const Tensor whole_;
  Tensor view_;
};

// Calls visit(group, begin, count).
template <typename Visit>
void for_each_group(const Tensor& ends, Visit&& visit) {
  const int32_t* const end = ends.const_data_ptr<int32_t>();
  int64_t begin = 0;
  for (int64_t group = 0; group < ends.size(0); ++group) {
    visit(group, begin, end[group] - begin);
    begin = end[group];
  }
}

// rows of each group @ its matrix, or its transpose: [rows, width].
Tensor times_matrices(const Tensor& rows, const Tensor& matrices, const Tensor& ends, bool transposed) {
  Tensor result = at::empty({rows.size(0), matrices.size(transposed ? 1 : 2)}, rows.options());
  Window from(rows), by(matrices), to(result);
  for_each_group(ends, [&](int64_t group, int64_t begin, int64_t count) {
    if (count == 0) return;
    at::mm_out(to.rows(begin, count), from.rows(begin, count),
               transposed ? by.transposed_matrix(group) : by.matrix(group));
  });
  return result;
}

// The transpose of each group's rows of `left` @ those of `right`: [groups, width of left, width of right].
Tensor products_of_groups(const Tensor& left, const Tensor& right, const Tensor& ends) {
  Tensor result = at::empty({ends.size(0), left.size(1), right.size(1)}, left.options());
  Window from(left), by(right), to(result);
  for_each_group(ends, [&](int64_t group, int64_t begin, int64_t count) {
    if (count == 0) {
      to.matrix(group).zero_();
    } else {
      at::mm_out(to.matrix(group), from.transposed_rows(begin, count), by.rows(begin, count));
    }
  });
  return result;
}

// The host's products, one for each group, on operands laid out as those of at::_grouped_mm and its backward.
struct HostProduct : public torch::autograd::Function<HostProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& rows, const Tensor& matrices, const Tensor& ends,
                        bool outputs_first) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward(
        {matrices.requires_grad() ? rows : Tensor(), rows.requires_grad() ? matrices : Tensor(), ends});
    context->saved_data["outputs_first"] = outputs_first;
    return times_matrices(rows, matrices, ends, outputs_first);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &rows = saved[0], &matrices = saved[1], &ends = saved[2];
    const bool outputs_first = context->saved_data["outputs_first"].toBool();
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor gradient = gradients[0].contiguous();
    Tensor of_rows, of_matrices;
    if (matrices.defined()) of_rows = times_matrices(gradient, matrices, ends, !outputs_first);
    if (rows.defined()) {
      of_matrices = outputs_first ? products_of_groups(gradient, rows, ends) : products_of_groups(rows, gradient, ends);
    }
    return {of_rows, of_matrices, {}, {}};
  }
};

constexpr int64_t kAlignedBytes = 16;

// Whether at::_grouped_mm takes these operands on the host, and is the loop over groups that HostProduct is.
bool is_plain(const Tensor& rows, const Tensor& matrices, const Tensor& ends) {
  const at::ScalarType dtype = rows.scalar_type();
  if (!rows.is_cpu() || !matrices.is_cpu() || !ends.is_cpu() || matrices.scalar_type() != dtype) return false;
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  if (rows.dim() != 2 || matrices.dim() != 3 || ends.dim() != 1 || ends.scalar_type() != at::kInt) return false;
  if (!rows.is_contiguous() || !matrices.is_contiguous() || !ends.is_contiguous()) return false;
  const int64_t aligned = kAlignedBytes / rows.element_size();
  return ends.size(0) == matrices.size(0) && matrices.size(1) % aligned == 0 && matrices.size(2) % aligned == 0;
}

bool fits(const Tensor& rows, const Tensor& matrices, bool outputs_first) {
  return matrices.dim() == 3 && rows.dim() == 2 && matrices.size(outputs_first ? 2 : 1) == rows.size(1);
}

Tensor without_host_product(const Tensor& rows, const Tensor& matrices, const Tensor& ends, bool outputs_first) {
  return at::_grouped_mm(rows, outputs_first ? matrices.transpose(-2, -1) : matrices, ends);
}

// Without a graph.
Tensor product_of(const Tensor& rows, const Tensor& matrices, const Tensor& ends, bool outputs_first) {
  if (fits(rows, matrices, outputs_first) && is_plain(rows, matrices, ends))
    return times_matrices(rows, matrices, ends, outputs_first);
  return without_host_product(rows, matrices, ends, outputs_first);
}

Tensor encoded_grouped_product(const Tensor& rows, const Weight& matrices, const Tensor& ends, bool outputs_first) {
  ProductWay way;
  way.forward = [=](const Tensor& given, const Tensor& numbers, const auto&) {
    return product_of(given, numbers, ends, outputs_first);
  };
  way.backward = [=](const Tensor& gradient, const Tensor& numbers) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return product_of(gradient.contiguous(), numbers, ends, !outputs_first);
  };
  way.autocasts = false;
  return encoded_product(rows, matrices, std::move(way));
}

}  // namespace

Tensor grouped_product(const Tensor& rows, const Weight& weight, const Tensor& ends, Stacked stacked) {
  const bool outputs_first = stacked == Stacked::kOutputsFirst;
  if (weight.is_encoded()) return encoded_grouped_product(rows, weight, ends, outputs_first);
  const Tensor& matrices = weight.parts()[0];
  if (fits(rows, matrices, outputs_first) && is_plain(rows, matrices, ends))
    return HostProduct::apply(rows, matrices, ends, outputs_first);
  return without_host_product(rows, matrices, ends, outputs_first);
}

}  // namespace roundpipe::ops
