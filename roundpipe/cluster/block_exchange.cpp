#include <roundpipe/cluster/block_exchange.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include <c10/util/accumulate.h>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

using memory::BlockLayout;
using memory::GradientBlock;
using Link = Nodes::Link;

namespace {

// What a node has of a block's gradients.
enum class Has : uint8_t { kNothing, kGradients, kFailed };

struct Header {
  uint64_t step;
  uint64_t block;
  Has has;
};

// The headers of all nodes, and for which parameters each has a gradient.
struct Headers {
  std::vector<Header> of;                   // one for each rank
  std::vector<std::vector<char>> received;  // [rank][parameter]
};

Headers exchange_headers(Nodes& nodes, const Turn& turn, const GradientBlock& own, size_t parameters) {
  const size_t size = sizeof(Header) + parameters;
  const at::Tensor sent = at::zeros({static_cast<int64_t>(size)}, at::kByte);
  const bool has =
      own.flat.defined() && std::any_of(own.received.begin(), own.received.end(), [](char r) { return r; });
  const Header header{turn.step, turn.block,
                      own.landed->error() ? Has::kFailed : (has ? Has::kGradients : Has::kNothing)};
  auto* const bytes = sent.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &header, sizeof header);
  if (header.has == Has::kGradients) std::copy(own.received.begin(), own.received.end(), bytes + sizeof header);
  const at::Tensor all = at::empty({nodes.size(), static_cast<int64_t>(size)}, at::kByte);
  nodes.all_gather(Link::kGradients, all, sent, turn.name);
  Headers headers;
  for (int rank = 0; rank < nodes.size(); ++rank) {
    const auto* const from = all.const_data_ptr<uint8_t>() + static_cast<size_t>(rank) * size;
    Header& each = headers.of.emplace_back();
    std::memcpy(&each, from, sizeof each);
    headers.received.emplace_back(from + sizeof each, from + size);
    if (each.step == turn.step && each.block == turn.block) continue;
    throw Error(concat("[cluster] rank ", rank, " exchanges block ", each.block, " of step ", each.step,
                       " of its optimizer while rank ", nodes.rank(), " exchanges block ", turn.block, " of step ",
                       turn.step,
                       "; every rank must make the same steps: call step() on all of them equally often, "
                       "and start all again from the last checkpoint"));
  }
  return headers;
}

at::Tensor bytes_of(const at::Tensor& flat, int64_t begin, int64_t end) { return flat.narrow(0, begin, end - begin); }

constexpr int64_t kPiece = 1024;  // elements that are added at a time

// sum[i] = (first + second + ...) * factor; a null source counts as zeros.
template <typename T>
void add_up(const std::vector<const uint8_t*>& sources, T* to, int64_t count, float factor) {
  std::array<float, kPiece> sum;
  std::array<T, kPiece> piece;  // sources need not be aligned
  for (int64_t at = 0; at < count; at += kPiece) {
    const auto length = static_cast<size_t>(std::min(kPiece, count - at));
    for (size_t rank = 0; rank < sources.size(); ++rank) {
      if (sources[rank] == nullptr) {
        std::fill_n(piece.begin(), length, static_cast<T>(0.0F));
      } else {
        std::memcpy(piece.data(), sources[rank] + static_cast<size_t>(at) * sizeof(T), length * sizeof(T));
      }
      for (size_t i = 0; i < length; ++i) {
        const auto value = static_cast<float>(piece[i]);
        sum[i] = rank == 0 ? value : sum[i] + value;
      }
    }
    for (size_t i = 0; i < length; ++i) to[static_cast<size_t>(at) + i] = static_cast<T>(sum[i] * factor);
  }
}

void add_up(c10::ScalarType dtype, const std::vector<const uint8_t*>& sources, uint8_t* to, int64_t count,
            float factor) {
  switch (dtype) {
    case at::kFloat:
      return add_up(sources, reinterpret_cast<float*>(to), count, factor);
    case at::kBFloat16:
      return add_up(sources, reinterpret_cast<c10::BFloat16*>(to), count, factor);
    case at::kHalf:
      return add_up(sources, reinterpret_cast<c10::Half*>(to), count, factor);
    default:
      throw Error(concat("[cluster] gradients of ", c10::toString(dtype), " cannot be added"));
  }
}

}  // namespace

BlockShards shard_block(const BlockLayout& weights, const BlockLayout& gradients, const std::vector<char>& trained,
                        int nodes) {
  std::vector<int64_t> elements;
  for (const memory::TensorLayout& tensor : weights.tensors) {
    elements.push_back(c10::multiply_integers(tensor.sizes));
  }
  BlockShards shards;
  shards.elements = optim::cut_into_shards(elements, nodes);
  shards.weights = locate_shards(weights, shards.elements, trained);
  shards.gradients = locate_shards(gradients, shards.elements, trained);
  return shards;
}

Exchanged exchange_gradients(Nodes& nodes, const Turn& turn, const GradientBlock& own, const BlockLayout& layout,
                             const BlockShards& shards, float factor, const memory::BufferPool& buffers) {
  const Headers headers = exchange_headers(nodes, turn, own, layout.tensors.size());
  Exchanged exchanged;
  bool any = false;
  for (int rank = 0; rank < nodes.size(); ++rank) {
    const Has has = headers.of[static_cast<size_t>(rank)].has;
    if (has == Has::kFailed) exchanged.failed.push_back(rank);
    any |= has == Has::kGradients;
  }
  if (!exchanged.failed.empty()) return exchanged;
  exchanged.sums = std::make_shared<GradientBlock>();
  GradientBlock& sums = *exchanged.sums;
  sums.received.assign(layout.tensors.size(), 0);
  for (const auto& received : headers.received) {
    for (size_t i = 0; i < received.size(); ++i) sums.received[i] |= received[i];
  }
  if (any) sums.flat = own.flat.defined() ? own.flat : buffers.take();
  const auto self = static_cast<size_t>(nodes.rank());
  const auto ranks = static_cast<size_t>(nodes.size());
  for (const ShardBytes::Run& run : shards.gradients.runs) {
    if (!any) break;
    const int64_t begin = run.bounds[self];
    const int64_t share = run.shard_bytes(self);
    std::vector<int64_t> sent_bytes(ranks);
    std::vector<int64_t> received_bytes(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (headers.of[self].has == Has::kGradients) sent_bytes[rank] = run.shard_bytes(rank);
      if (headers.of[rank].has == Has::kGradients) received_bytes[rank] = share;
    }
    const int64_t total = std::accumulate(received_bytes.begin(), received_bytes.end(), int64_t{0});
    const at::Tensor received = bytes_of(nodes.scratch(Link::kGradients, total), 0, total);
    const int64_t end = headers.of[self].has == Has::kGradients ? run.bounds.back() : run.bounds.front();
    nodes.all_to_all(Link::kGradients, received, received_bytes, bytes_of(sums.flat, run.bounds.front(), end),
                     sent_bytes, turn.name);
    for (size_t p = run.first_parameter; p < run.last_parameter; ++p) {
      const optim::ElementRange range = shards.elements[self][p];
      if (range.count() == 0 || !sums.received[p]) continue;
      const memory::TensorLayout& tensor = layout.tensors[p];
      const int64_t at = tensor.offset_bytes + range.first * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      std::vector<const uint8_t*> sources(ranks);
      const uint8_t* of_rank = received.const_data_ptr<uint8_t>();
      for (size_t rank = 0; rank < ranks; ++rank) {
        if (headers.received[rank][p]) sources[rank] = of_rank + (at - begin);
        of_rank += received_bytes[rank];
      }
      add_up(tensor.dtype, sources, sums.flat.mutable_data_ptr<uint8_t>() + at, range.count(), factor);
    }
  }
  sums.landed->fire();
  return exchanged;
}

void gather_weights(Nodes& nodes, const Turn& turn, const at::Tensor& flat, const BlockShards& shards, bool fills) {
  const auto self = static_cast<size_t>(nodes.rank());
  const auto ranks = static_cast<size_t>(nodes.size());
  for (const ShardBytes::Run& run : shards.weights.runs) {
    // Each row starts with whether the node has its shard.
    const int64_t row = run.largest_bytes() + 1;
    const at::Tensor rows =
        bytes_of(nodes.scratch(Link::kWeights, (nodes.size() + 1) * row), 0, (nodes.size() + 1) * row)
            .view({nodes.size() + 1, row});
    const at::Tensor own = rows[nodes.size()];
    auto* const sent = own.mutable_data_ptr<uint8_t>();
    sent[0] = flat.defined() ? 1 : 0;
    if (flat.defined()) {
      std::memcpy(sent + 1, flat.const_data_ptr<uint8_t>() + run.bounds[self],
                  static_cast<size_t>(run.shard_bytes(self)));
    }
    nodes.all_gather(Link::kWeights, rows.narrow(0, 0, nodes.size()), own, turn.name);
    const auto* const all = rows.const_data_ptr<uint8_t>();
    for (size_t rank = 0; rank < ranks; ++rank) {
      const uint8_t* const from = all + rank * static_cast<size_t>(row);
      if (from[0] == 0) {
        throw Error(concat("[cluster] rank ", rank, " could not make its part of ", turn.name,
                           "; the error on that rank says why: start all ranks again from the last checkpoint"));
      }
      if (!fills || rank == self) continue;
      std::memcpy(flat.mutable_data_ptr<uint8_t>() + run.bounds[rank], from + 1,
                  static_cast<size_t>(run.shard_bytes(rank)));
    }
  }
}

}  // namespace roundpipe::cluster
