#include <roundpipe/device/accelerator/accelerator_device.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/accelerator/completion_thread.h>

namespace roundpipe::device {
namespace {

class AcceleratorScope final : public QueueScope {
 public:
  explicit AcceleratorScope(c10::Stream stream) : guard_(stream) {}

 private:
  c10::StreamGuard guard_;  // sets the device and the current stream
};

class AcceleratorQueue final : public Queue {
 public:
  AcceleratorQueue(c10::Device device, bool timed)
      : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
        completion_(stream_, timed) {}

  std::unique_ptr<QueueScope> enter() override { return std::make_unique<AcceleratorScope>(stream_); }

  void copy(const at::Tensor& dst, const at::Tensor& src) override { dst.copy_(src, /*non_blocking=*/true); }

  void signal(EventPtr event) override {
    std::exception_ptr error;
    try {
      completion_.watch(event);
      return;
    } catch (...) {
      error = std::current_exception();
    }
    // Whoever waits for `event` will release the memory, so running work must end first. If synchronizing fails too,
    // the device has faulted, and nothing runs.
    try {
      stream_.synchronize();
    } catch (...) {
    }
    event->fail(error);
  }

  void uses(const at::Tensor& tensor) override {
    if (tensor.defined() && tensor.device() == stream_.device()) tensor.record_stream(stream_);
  }

  // Waits for all work issued so far. Throws if the device cannot tell. Any thread.
  void finish() const { stream_.synchronize(); }

  void emulate(double /*duration_ms*/) override {
    throw Error("[emulate] emulated layers run on virtual devices only; use devices('virtual:N')");
  }

 private:
  const c10::Stream stream_;
  CompletionThread completion_;
};

class AcceleratorDevice final : public Device {
 public:
  AcceleratorDevice(const DeviceSpec& spec, c10::Device device, int64_t limit_bytes)
      : Device(spec, device),
        compute_(device, /*timed=*/true),
        upload_(device, false),
        download_(device, false),
        limit_bytes_(limit_bytes) {
    health()->probe_with([this] { compute_.finish(); });
  }
  ~AcceleratorDevice() override { health()->probe_with(nullptr); }

  Queue& compute() override { return compute_; }
  Queue& upload() override { return upload_; }
  Queue& download() override { return download_; }

  MemoryStats memory() const override {
    const auto stats = at::getDeviceAllocator(torch_device().type())->getDeviceStats(torch_device().index());
    const auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    return {bytes.current, bytes.peak, memory_limit_bytes(), bytes.allocated};
  }
  int64_t memory_limit_bytes() const override { return limit_bytes_.load(); }

  void reset_peak_memory() override {
    at::getDeviceAllocator(torch_device().type())->resetPeakStats(torch_device().index());
  }

  void limit_memory(int64_t limit_bytes) override {
    if (limit_bytes < limit_bytes_.load()) limit_bytes_.store(limit_bytes);
  }
  bool wants_pinned_host_memory() const override { return true; }
  void poison(const at::Tensor& /*tensor*/) override {}

 private:
  AcceleratorQueue compute_;
  AcceleratorQueue upload_;
  AcceleratorQueue download_;
  std::atomic<int64_t> limit_bytes_;
};

// The memory that one of the card's workers may use: its share of the free memory, without a reserve.
int64_t free_share_bytes(c10::Device device, int sharers) {
  c10::DeviceAllocator& allocator = *at::getDeviceAllocator(device.type());
  const auto [free_bytes, total_bytes] = allocator.getMemoryInfo(device.index());
  // Memory that torch's allocator keeps for its next tensors is free, too.
  const auto stats = allocator.getDeviceStats(device.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const int64_t kept_bytes = stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  const int64_t reserve_bytes = static_cast<int64_t>(total_bytes) / kReservedPart;
  return std::max<int64_t>(1, (static_cast<int64_t>(free_bytes) + kept_bytes - reserve_bytes) / sharers);
}

}  // namespace

std::unique_ptr<Device> make_accelerator_device(const DeviceSpec& spec, int sharers) {
  const auto type = at::accelerator::getAccelerator(false);
  const int count = type ? static_cast<int>(at::accelerator::deviceCount()) : 0;
  const std::string found = type ? c10::DeviceTypeName(*type, /*lower_case=*/true) : "none";
  if (count == 0 || spec.type != found || spec.index >= count) {
    throw std::invalid_argument(concat("[devices] '", spec.name(), "' does not exist: torch sees ", count,
                                       " accelerators of type ", found, "; name one of those or use 'virtual:N'"));
  }
  at::globalContext().lazyInitDevice(*type);  // for streams and statistics, if this is the first use
  const c10::Device device(*type, static_cast<c10::DeviceIndex>(spec.index));
  const int64_t limit_bytes = spec.memory_bytes > 0 ? spec.memory_bytes : free_share_bytes(device, sharers);
  return std::make_unique<AcceleratorDevice>(spec, device, limit_bytes);
}

}  // namespace roundpipe::device
