#pragma once

#include <array>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/event.h>
#include <roundpipe/memory/block_layout.h>

namespace roundpipe::memory {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Parameters that move together, flat on the host, in up to two buffers: the version that calls read and, once an
// asynchronous step has been made, the one that is being published. Nothing is overwritten under a pending upload.
//
// Ownership: the user's parameters become views of the current buffer.
// Thread safety: begin_publish, read, repoint from the caller's thread; finish_publish from the optimizer's thread,
// once for each begin_publish, in order.
class ParameterBlock {
 public:
  // Copies the values of `parameters` and points them at the block, one by one, so host memory peaks at one
  // parameter more. REQUIRES: all on the CPU.
  ParameterBlock(std::vector<NamedTensor> parameters, bool pinned);

  const BlockLayout& layout() const { return layout_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }

  // What one upload reads. `generation` changes when the buffer is given to a newer version.
  struct Reading {
    at::Tensor flat;             // uint8 [layout().size_bytes]
    device::EventPtr published;  // fires when the version is complete
    int buffer = 0;
    int64_t generation = 0;
  };
  Reading read() const;
  // Whether `reading` still holds the version it was made for.
  bool still_holds(const Reading& reading) const { return generation_[reading.buffer] == reading.generation; }
  // An upload from `reading` that is over when `uploaded` is complete.
  void add_reader(const Reading& reading, device::EventPtr uploaded);

  // Makes room for the next version: calls submitted from now on read it. `in_place` reuses the current buffer.
  void begin_publish(bool in_place);
  // Waits for the last upload of what is in the buffer's place, copies `values` (one per parameter, any floating
  // dtype, host) into it and fires the published event.
  void finish_publish(const std::vector<at::Tensor>& values);

  // Points the user's parameters at the version that calls read. Never blocks.
  void repoint();

  // Puts parameters whose storage the user replaced (for example with `.data =`) back into the block, with the
  // user's values. Throws std::invalid_argument when a dtype, shape or device has changed.
  void adopt_replaced();

  int64_t host_bytes() const;

 private:
  struct Publication {
    int buffer;
    std::vector<device::EventPtr> readers;
    device::EventPtr published;
  };

  BlockLayout layout_;
  std::vector<NamedTensor> parameters_;
  bool pinned_;
  int current_ = 0;
  std::array<at::Tensor, 2> buffers_;
  std::array<int64_t, 2> generation_{};
  std::array<device::EventPtr, 2> published_;
  std::array<std::vector<device::EventPtr>, 2> readers_;
  std::mutex mutex_;
  std::deque<Publication> publications_;  // protected by mutex_: begun, not finished, oldest first
};

}  // namespace roundpipe::memory
