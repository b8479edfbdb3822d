#include <roundpipe/memory/block_layout.h>

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/core/bytes.h>

using namespace roundpipe::memory;
using roundpipe::kBlockAlignment_bytes;

TEST_CASE("layout: tensors lie aligned, apart, and the block is as long as all of them") {
  BlockLayout layout;
  const std::vector<at::Tensor> tensors = {at::empty({3}), at::empty({0, 4}), at::empty({}), at::empty({64, 2}),
                                           at::empty({7}, at::kBFloat16)};
  for (size_t i = 0; i < tensors.size(); ++i) CHECK(layout.add(tensors[i], tensors[i].scalar_type()) == i);
  int64_t end_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorLayout& tensor = layout.tensors[i];
    CHECK(tensor.offset_bytes % kBlockAlignment_bytes == 0);
    CHECK(tensor.offset_bytes >= end_bytes);
    CHECK(tensor.size_bytes == static_cast<int64_t>(tensors[i].nbytes()));
    end_bytes = tensor.offset_bytes + tensor.size_bytes;
  }
  CHECK(layout.size_bytes >= end_bytes);
  CHECK(layout.size_bytes % kBlockAlignment_bytes == 0);
  CHECK(BlockLayout{}.size_bytes == 0);
}

TEST_CASE("layout: views have the shape, dense strides and dtype of what was added, and share the block's memory") {
  const std::vector<at::Tensor> tensors = {
      at::randn({4, 5}),
      at::randn({5, 4}).t(),
      at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      at::randn({1, 3, 1, 1}),
      at::randn({6}).to(at::kBFloat16),
      at::tensor(2.5),
      at::randn({2, 0, 3}),
      at::randn({3}, at::kDouble),
  };
  BlockLayout layout;
  for (const at::Tensor& tensor : tensors) layout.add(tensor, tensor.scalar_type());
  const at::Tensor flat = at::empty({layout.size_bytes}, at::kByte);
  for (size_t i = 0; i < tensors.size(); ++i) layout.view(flat, i).copy_(tensors[i]);
  for (size_t i = 0; i < tensors.size(); ++i) {
    CAPTURE(i);
    const at::Tensor view = layout.view(flat, i);
    CHECK(view.sizes() == tensors[i].sizes());
    CHECK(view.strides() == tensors[i].strides());
    CHECK((view.scalar_type() == tensors[i].scalar_type()));
    CHECK(view.storage().is_alias_of(flat.storage()));
    CHECK_FALSE(view.requires_grad());
    CHECK_FALSE(view.is_view());
    CHECK(at::equal(view, tensors[i]));
    if (view.numel() > 0) {
      CHECK(static_cast<const char*>(view.data_ptr()) - static_cast<const char*>(flat.data_ptr()) ==
            layout.tensors[i].offset_bytes);
    }
  }
}

TEST_CASE("layout: what is not dense becomes contiguous") {
  BlockLayout layout;
  const at::Tensor sliced = at::arange(24, at::kFloat).view({4, 6}).slice(1, 0, 6, 2);
  const at::Tensor expanded = at::ones({3, 1}).expand({3, 4});
  layout.add(sliced, at::kFloat);
  layout.add(expanded, at::kFloat);
  const at::Tensor flat = at::empty({layout.size_bytes}, at::kByte);
  CHECK(layout.view(flat, 0).is_contiguous());
  CHECK(layout.view(flat, 1).is_contiguous());
  layout.view(flat, 1).copy_(expanded);
  layout.view(flat, 0).copy_(sliced);
  CHECK(at::equal(layout.view(flat, 0), sliced));
  CHECK(at::equal(layout.view(flat, 1), expanded));
}

TEST_CASE("layout: a tensor may be kept in another dtype") {
  BlockLayout layout;
  const at::Tensor weight = at::randn({10, 10});
  layout.add(weight, at::kBFloat16);
  CHECK(layout.tensors[0].size_bytes == 200);
  const at::Tensor flat = at::empty({layout.size_bytes}, at::kByte);
  layout.view(flat, 0).copy_(weight);
  CHECK(at::equal(layout.view(flat, 0), weight.to(at::kBFloat16)));
}

TEST_CASE("layout: a block may start anywhere aligned inside a larger one") {
  BlockLayout layout;
  layout.add(at::empty({5}), at::kFloat);
  layout.add(at::empty({5}), at::kDouble);
  const at::Tensor flat = at::zeros({3 * layout.size_bytes}, at::kByte);
  layout.view(flat, 1, layout.size_bytes).fill_(1.0);
  layout.view(flat.narrow(0, layout.size_bytes, layout.size_bytes), 0).fill_(2.0);
  CHECK(at::equal(layout.view(flat, 1, layout.size_bytes), at::ones({5}, at::kDouble)));
  CHECK(at::equal(layout.view(flat, 0, layout.size_bytes), at::full({5}, 2.0)));
  CHECK(flat.narrow(0, 0, layout.size_bytes).count_nonzero().item<int64_t>() == 0);
  CHECK(flat.narrow(0, 2 * layout.size_bytes, layout.size_bytes).count_nonzero().item<int64_t>() == 0);
}
