// Does the upload path of a layer move bytes as fast as a plain copy of them, and what does the flat block save?
//
// First: layers of one size, each a flat block in the host arena, are uploaded one after the other through a
// LinkScheduler into the two weight slots of a virtual device, as the runtime does it: the next one is asked for when
// the slot's last user is through. Against it std::memcpy of the same blocks to the same two slots. Both take turns in
// one process, so both write to memory that was written to before, and the slots are compared with the blocks after
// every turn. A ratio of 0.95 is expected: the link's thread, its events and its chunks of 64 MB should cost no more.
// Above 1 a copy of the link's is faster: it writes past the caches from 4 MiB on, the C library's from sizes that it
// takes from the cache that the machine says it has.
//
// Second: a layer of 128 experts with three weights each, as one flat block and tensor by tensor, through the same
// link; without a latency, where only the host's own work counts, and with one of 10 us for each copy, about what
// starting one costs on a card. Tensors under 4 MiB are copied through the caches, which is slower, too.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/memory/block_layout.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/memory/weight_slots.h>
#include <roundpipe/transfer/link_scheduler.h>

#include "support/report.h"

namespace {

using namespace roundpipe;
using bench::fixed;
using device::Piece;
using transfer::LinkScheduler;

constexpr int64_t kMB = 1'000'000;

// A virtual device with both its weight slots taken.
class Target {
 public:
  Target(const std::string& spec, int64_t slot_bytes)
      : device_(std::move(device::make_devices(device::parse_devices(spec)).front())),
        slots_(*device_),
        link_(device_->upload()) {
    const auto scope = device_->upload().enter();
    slots_.expect(2 * align_up(slot_bytes, kBlockAlignment_bytes));
    for (int slot = 0; slot < memory::WeightSlots::kSlots; ++slot) {
      if (slots_.try_acquire(slot_bytes, 0) != slot) throw Error("[bench] the slots are not free");
      buffers_.push_back(slots_.buffer(slot, slot_bytes).fill_(0));
    }
  }

  LinkScheduler& link() { return link_; }
  const at::Tensor& slot(size_t upload) const { return buffers_[upload % buffers_.size()]; }

 private:
  std::unique_ptr<device::Device> device_;
  memory::WeightSlots slots_;
  LinkScheduler link_;
  std::vector<at::Tensor> buffers_;
};

// Milliseconds to move `uploads` layers, at most one for each slot under way. `pieces` of a layer are what one transfer
// moves; with `one_by_one` each piece is a transfer of its own.
double upload_ms(Target& target, size_t uploads, const std::function<std::vector<Piece>(size_t)>& pieces,
                 bool one_by_one = false) {
  std::vector<std::vector<device::EventPtr>> done(uploads);
  const double start_ms = now_ms();
  const auto submit = [&](size_t upload, std::vector<Piece> moved) {
    done[upload].push_back(device::make_event());
    target.link().submit({.priority = transfer::Priority::kWeight,
                          .after = {},
                          .begin = [moved = std::move(moved)] { return moved; },
                          .done = done[upload].back(),
                          .settled = nullptr});
  };
  for (size_t upload = 0; upload < uploads; ++upload) {
    if (upload >= memory::WeightSlots::kSlots) {
      for (const auto& event : done[upload - memory::WeightSlots::kSlots]) event->wait();
    }
    if (one_by_one) {
      for (Piece& piece : pieces(upload)) submit(upload, {std::move(piece)});
    } else {
      submit(upload, pieces(upload));
    }
  }
  for (const auto& events : done) {
    for (const auto& event : events) event->wait();
  }
  return now_ms() - start_ms;
}

void check_same(const at::Tensor& slot, const at::Tensor& block) {
  if (std::memcmp(slot.const_data_ptr(), block.const_data_ptr(), static_cast<size_t>(block.numel())) != 0) {
    std::cerr << "the slot does not hold the layer's bytes\n";
    std::exit(1);
  }
}

// A block of bytes that differ from place to place and from block to block.
at::Tensor filled_block(int64_t size_bytes, int64_t number) {
  const at::Tensor block = memory::HostArena::pageable().allocate(size_bytes);
  auto* const bytes = block.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < size_bytes; ++i) bytes[i] = static_cast<uint8_t>(number + i + (i >> 8));
  return block;
}

double gb_per_s(int64_t size_bytes, double ms) { return static_cast<double>(size_bytes) / ms / 1e6; }

std::vector<std::string> compare_with_memcpy(int64_t layer_bytes, int64_t moved_bytes, int rounds) {
  const size_t uploads = static_cast<size_t>(std::max<int64_t>(4, moved_bytes / layer_bytes));
  // As many different blocks as a turn has uploads, up to what does not fit into a cache in any case.
  const size_t count = std::min<size_t>(uploads, static_cast<size_t>(std::max<int64_t>(2, 1024 * kMB / layer_bytes)));
  std::vector<at::Tensor> blocks;
  for (size_t i = 0; i < count; ++i) blocks.push_back(filled_block(layer_bytes, static_cast<int64_t>(i)));
  Target target("virtual:1", layer_bytes);
  const auto flat = [&](size_t upload) { return std::vector<Piece>{{target.slot(upload), blocks[upload % count]}}; };
  std::vector<double> link_ms;
  std::vector<double> memcpy_ms;
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    for (const bool through_link : {true, false}) {
      for (size_t upload : {0, 1}) std::memset(target.slot(upload).mutable_data_ptr(), 0, 4096);
      double ms = 0;
      if (through_link) {
        ms = upload_ms(target, uploads, flat);
      } else {
        const double start_ms = now_ms();
        for (size_t upload = 0; upload < uploads; ++upload) {
          std::memcpy(target.slot(upload).mutable_data_ptr(), blocks[upload % count].const_data_ptr(),
                      static_cast<size_t>(layer_bytes));
        }
        ms = now_ms() - start_ms;
      }
      for (size_t upload = uploads - 2; upload < uploads; ++upload) {
        check_same(target.slot(upload), blocks[upload % count]);
      }
      if (round >= 0) (through_link ? link_ms : memcpy_ms).push_back(ms);
    }
  }
  const int64_t bytes = layer_bytes * static_cast<int64_t>(uploads);
  std::vector<double> ratios;
  for (size_t i = 0; i < link_ms.size(); ++i) ratios.push_back(memcpy_ms[i] / link_ms[i]);
  return {concat(layer_bytes / kMB),
          concat(uploads),
          fixed(gb_per_s(bytes, bench::median(memcpy_ms)), 2),
          fixed(gb_per_s(bytes, bench::median(link_ms)), 2),
          fixed(bench::median(memcpy_ms) / bench::median(link_ms), 3),
          fixed(bench::median(ratios), 3)};
}

std::vector<std::string> compare_experts(const std::string& spec, int64_t experts, int64_t tensor_bytes, int rounds) {
  memory::BlockLayout layout;
  const at::Tensor shape = at::arange(tensor_bytes).to(at::kByte);
  for (int64_t i = 0; i < 3 * experts; ++i) layout.add(shape, at::kByte);
  const at::Tensor block = filled_block(layout.size_bytes, 7);
  Target target(spec, layout.size_bytes);
  constexpr size_t kUploads = 4;
  const auto flat = [&](size_t upload) { return std::vector<Piece>{{target.slot(upload), block}}; };
  const auto tensors = [&](size_t upload) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < layout.tensors.size(); ++i) {
      pieces.push_back({layout.view(target.slot(upload), i), layout.view(block, i)});
    }
    return pieces;
  };
  std::vector<double> flat_ms;
  std::vector<double> tensors_ms;
  for (int round = -1; round < rounds; ++round) {
    for (const bool one_copy : {true, false}) {
      for (size_t slot : {0, 1}) std::memset(target.slot(slot).mutable_data_ptr(), 0, 4096);
      const double ms = upload_ms(target, kUploads, one_copy ? std::function(flat) : std::function(tensors), !one_copy);
      for (size_t slot : {0, 1}) check_same(target.slot(slot), block);
      if (round >= 0) (one_copy ? flat_ms : tensors_ms).push_back(ms);
    }
  }
  const double per_layer = 1.0 / kUploads;
  return {concat("`", spec, "`"),
          fixed(static_cast<double>(tensor_bytes) / 1000, 0),
          fixed(static_cast<double>(layout.size_bytes) / kMB, 1),
          fixed(bench::median(tensors_ms) * per_layer, 2),
          fixed(bench::median(flat_ms) * per_layer, 2),
          fixed(bench::median(tensors_ms) / bench::median(flat_ms), 3)};
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Options options = bench::parse_options(argc, argv);
  const at::NoGradGuard no_grad;
  const int rounds = options.quick ? 1 : 9;
  const std::vector<int64_t> layers =
      options.quick ? std::vector<int64_t>{1, 130} : std::vector<int64_t>{8, 64, 256, 1024};
  bench::Report report("Transfer: the upload path of a layer against a plain copy", "bench_transfer", options);
  report.line(concat("Medians of ", rounds,
                     " turns, all in one process. The slots' bytes were compared with the layers' after every turn."));
  report.line("");
  report.line(
      "Layers uploaded one after the other into two weight slots, and `memcpy` of the same to the same place. The "
      "ratio is of the medians; beside it the median of the turns' own ratios:");
  report.line("");
  std::vector<std::vector<std::string>> rows;
  for (const int64_t layer : layers) {
    rows.push_back(compare_with_memcpy(layer * kMB, options.quick ? 8 * kMB : 2048 * kMB, rounds));
  }
  report.table({"layer MB", "layers a turn", "memcpy GB/s", "link GB/s", "ratio", "by turn"}, rows);
  report.line(
      "Layers of 128 experts with three weights each, tensor by tensor and as one flat block, through the same "
      "link; ms a layer. A latency is added to every copy, chunks of a large one included:");
  report.line("");
  rows.clear();
  for (const char* spec : {"virtual:1", "virtual:1,latency=10us"}) {
    for (const int64_t kilobytes : options.quick ? std::vector<int64_t>{4} : std::vector<int64_t>{50, 800, 3146}) {
      rows.push_back(compare_experts(spec, 128, align_up(kilobytes * 1000, kBlockAlignment_bytes), rounds));
    }
  }
  report.table({"device", "tensor KB", "layer MB", "tensor by tensor ms", "flat block ms", "ratio"}, rows);
  report.close();
  return 0;
}
