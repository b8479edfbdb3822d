#include <roundpipe/memory/host_value.h>

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "place_of.h"

using namespace roundpipe::memory;
using roundpipe::device::Piece;

namespace {

// To the host and back to a device, as a value moves between two stages: one run of bytes each way.
at::Tensor round_trip(const at::Tensor& tensor, int64_t& host_bytes) {
  std::vector<Piece> pieces;
  const HostValuePtr value = stage_download(settled(tensor), tensor.requires_grad(), /*pinned=*/false, pieces);
  at::Tensor uploaded = stage_upload(*value, c10::Device(c10::kCPU), pieces);
  REQUIRE(pieces.size() == 2);
  host_bytes = static_cast<int64_t>(pieces[0].dst.nbytes());
  for (const Piece& piece : pieces) {
    CHECK(piece.src.is_contiguous());
    CHECK(piece.dst.is_contiguous());
    piece.dst.copy_(piece.src);
  }
  return restore_broadcast(*value, uploaded);
}

}  // namespace

TEST_CASE("host value: values, shape, dtype, strides and place survive the trip") {
  const at::Tensor base = at::randn({2, 3, 4, 5});
  for (const at::Tensor& tensor :
       {base, base.permute({3, 1, 0, 2}), base.contiguous(at::MemoryFormat::ChannelsLast), base.to(at::kBFloat16),
        at::tensor(3), at::empty({0, 2}), base > 0, base.narrow(0, 1, 1).transpose(1, 3)}) {
    CAPTURE(tensor.sizes());
    int64_t host_bytes = 0;
    const at::Tensor back = round_trip(tensor, host_bytes);
    CHECK((back.scalar_type() == tensor.scalar_type()));
    CHECK(back.strides() == tensor.strides());
    CHECK(at::equal(back, tensor));
    CHECK(place_of(back) == place_of(tensor));
    CHECK(host_bytes == static_cast<int64_t>(tensor.nbytes()));
  }
}

TEST_CASE("host value: gaps travel up to twice the values; beyond, what travels is packed") {
  const at::Tensor base = at::arange(48).view({4, 12});
  int64_t host_bytes = 0;
  const at::Tensor half = base.slice(1, 1, 12, 2);
  CHECK(at::equal(round_trip(half, host_bytes), half));
  CHECK(round_trip(half, host_bytes).strides() == half.strides());
  CHECK(host_bytes == (3 * 12 + 11) * 8);
  const at::Tensor third = base.slice(1, 1, 12, 3);
  CHECK(at::equal(round_trip(third, host_bytes), third));
  CHECK(host_bytes == third.numel() * 8);
  const at::Tensor windows = at::arange(12).unfold(0, 4, 1);
  CHECK(at::equal(round_trip(windows, host_bytes), windows));
  CHECK(host_bytes == 12 * 8);
}

TEST_CASE("host value: of the caller's tensors only the values are read") {
  const at::Tensor base = at::full({6, 10}, 7);
  const at::Tensor half = base.slice(1, 1, 10, 2);
  for (const HostValuePtr& value : {copy_to_host(half, false, false), refer_to_host(half, false)}) {
    CHECK(at::equal(value->data, half));
    CHECK(value->data.strides() == half.strides());
    CHECK(place_of(value->data) == place_of(half));
    CHECK(flat_span(value->data).sum().item<int64_t>() == half.sum().item<int64_t>());
  }
  const at::Tensor third = base.slice(1, 0, 10, 3);
  CHECK(copy_to_host(third, true, false)->data.is_contiguous());
  CHECK(copy_to_host(third, true, false)->requires_grad);
  // By reference where there are no gaps to be read.
  CHECK(refer_to_host(base[2], false)->data.is_alias_of(base));
  CHECK_FALSE(copy_to_host(base[2], false, false)->data.is_alias_of(base));
}

TEST_CASE("host value: broadcast dimensions travel once") {
  const at::Tensor mask = at::randn({1, 1, 6, 6}).expand({8, 4, 6, 6});
  int64_t host_bytes = 0;
  const at::Tensor back = round_trip(mask, host_bytes);
  CHECK(at::equal(back, mask));
  CHECK(back.strides() == mask.strides());
  CHECK(host_bytes == 36 * 4);
}
