#include <roundpipe/memory/host_value.h>

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::memory;
using roundpipe::device::Piece;

namespace {

// To the host and back to a device, as a value travels between two stages.
at::Tensor round_trip(const at::Tensor& tensor, int64_t& host_bytes) {
  const HostValuePtr value = make_host_value(tensor, tensor.requires_grad(), /*pinned=*/false);
  std::vector<int64_t> expanded_sizes;
  value->data.copy_(without_broadcast(tensor.detach(), expanded_sizes));
  CHECK(expanded_sizes == value->expanded_sizes);
  host_bytes = static_cast<int64_t>(value->data.nbytes());
  std::vector<Piece> pieces;
  const at::Tensor uploaded = stage_upload(*value, c10::Device(c10::kCPU), pieces);
  for (const Piece& piece : pieces) piece.dst.copy_(piece.src);
  return restore_broadcast(*value, uploaded);
}

}  // namespace

TEST_CASE("host value: values, shape, dtype and dense strides survive the trip") {
  const at::Tensor base = at::randn({2, 3, 4, 5});
  for (const at::Tensor& tensor : {base, base.permute({3, 1, 0, 2}), base.contiguous(at::MemoryFormat::ChannelsLast),
                                   base.to(at::kBFloat16), at::tensor(3), at::empty({0, 2}), base > 0}) {
    CAPTURE(tensor.sizes());
    int64_t host_bytes = 0;
    const at::Tensor back = round_trip(tensor, host_bytes);
    CHECK((back.scalar_type() == tensor.scalar_type()));
    CHECK(back.strides() == tensor.strides());
    CHECK(at::equal(back, tensor));
    CHECK(host_bytes == static_cast<int64_t>(tensor.nbytes()));
  }
}

TEST_CASE("host value: what is not dense travels packed") {
  const at::Tensor sliced = at::arange(24).view({4, 6}).slice(1, 1, 6, 2);
  int64_t host_bytes = 0;
  CHECK(at::equal(round_trip(sliced, host_bytes), sliced));
  CHECK(host_bytes == sliced.numel() * 8);
}

TEST_CASE("host value: broadcast dimensions travel once") {
  const at::Tensor mask = at::randn({1, 1, 6, 6}).expand({8, 4, 6, 6});
  int64_t host_bytes = 0;
  const at::Tensor back = round_trip(mask, host_bytes);
  CHECK(at::equal(back, mask));
  CHECK(back.strides() == mask.strides());
  CHECK(host_bytes == 36 * 4);
}
