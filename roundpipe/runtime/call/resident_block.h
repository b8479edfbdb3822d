#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/event.h>
#include <roundpipe/runtime/model/resident_copies.h>

namespace roundpipe::runtime {

// What tells whether the host's weights of a block, as the jobs of one submission read them, are those of a copy.
struct HostFingerprint {
  const device::EventPtr known = device::make_event();  // fires, and never fails
  // Of all bytes, and of how often each parameter was written to. Set before `known` fires; none: nobody knows, so the
  // weights are uploaded.
  std::optional<uint64_t> value;
};
using HostFingerprintPtr = std::shared_ptr<const HostFingerprint>;

// A frozen block of a job that lies in a copy beside its device's slots.
struct ResidentBlock {
  explicit ResidentBlock(HostFingerprintPtr of_host) : fingerprint(std::move(of_host)) {}
  ResidentBlock(const ResidentBlock&) = delete;
  ResidentBlock& operator=(const ResidentBlock&) = delete;
  ~ResidentBlock() { read->fire(); }

  const HostFingerprintPtr fingerprint;
  // Fires with this object: until then, the job may upload the block again.
  const device::EventPtr read = device::make_event();

  // Set under the lock of the queue, when the job gets its slot.
  device::EventPtr arrived;  // the copy holds the weights

  // Under the lock of the device's ResidentWeights.
  ResidentCopyPtr copy;

  // The link's thread's until `arrived` fires, then the device's thread's.
  at::Tensor weights;  // the memory of the copy
};

}  // namespace roundpipe::runtime
