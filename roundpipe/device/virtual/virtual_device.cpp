#include <roundpipe/device/virtual/virtual_device.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

#include <roundpipe/device/emulated_time.h>
#include <roundpipe/device/virtual/accounting_allocator.h>
#include <roundpipe/device/virtual/faults.h>
#include <roundpipe/device/virtual/streaming_copy.h>

namespace roundpipe::device {

Clock::time_point LinkThrottle::book(int64_t size_bytes, Clock::time_point from) {
  const MutexLock lock(mutex_);
  free_at_ = std::max(free_at_, from) + from_ms(static_cast<double>(size_bytes) / bytes_per_ms_);
  return free_at_;
}

namespace {

class VirtualScope final : public QueueScope {
 public:
  explicit VirtualScope(MemoryAccount* account) : scope_(account) {}

 private:
  AccountScope scope_;
};

bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && !a.is_conj() && !b.is_conj() && !a.is_neg() && !b.is_neg();
}

class VirtualQueue final : public Queue {
 public:
  // `faults`: those that change the bits of this queue's copies; null: none do.
  VirtualQueue(MemoryAccount* account, const Health& health, std::unique_ptr<LinkThrottle> link,
               std::shared_ptr<LinkThrottle> host, double latency_ms, const Faults* faults = nullptr)
      : account_(account),
        health_(health),
        link_(std::move(link)),
        host_(std::move(host)),
        latency_ms_(latency_ms),
        faults_(faults) {}

  std::unique_ptr<QueueScope> enter() override { return std::make_unique<VirtualScope>(account_); }

  void copy(const at::Tensor& dst, const at::Tensor& src) override {
    health_.check();
    const auto size_bytes = static_cast<int64_t>(src.nbytes());
    const Clock::time_point asked_at = Clock::now();
    if (same_dense_layout(dst, src)) {
      // copy_ would start an OpenMP team of its own on the copy thread.
      streaming_copy(dst.data_ptr(), src.data_ptr(), size_bytes);
    } else {
      dst.copy_(src);
    }
    if (faults_ != nullptr && faults_->wrong_bits() && size_bytes > 0) *static_cast<uint8_t*>(dst.data_ptr()) ^= 1;
    if (link_ || host_) pass(size_bytes, asked_at);
    if (latency_ms_ > 0) std::this_thread::sleep_until(asked_at + from_ms(latency_ms_));
  }

  void signal(EventPtr event) override {
    if (const std::exception_ptr failure = health_.failed() ? health_.failure() : nullptr) return event->fail(failure);
    event->fire();
  }

  void uses(const at::Tensor& /*tensor*/) override {}

  void emulate(double duration_ms) override { emulated_.spend(duration_ms); }

 private:
  // Blocks until the links have passed `size_bytes`.
  void pass(int64_t size_bytes, Clock::time_point asked_at) {
    // A chunk that follows at once starts when the previous one had passed, so that late wake-ups do not add up.
    constexpr double kAtOnce_ms = 0.5;
    Clock::time_point through = asked_at - awake_at_ < from_ms(kAtOnce_ms) ? through_at_ : asked_at;
    // Links share the host's bandwidth in slices of this time, so that one link's layer does not hold up the others.
    constexpr double kSlice_ms = 0.125;
    const auto most_bytes = host_ ? std::max<int64_t>(1, std::llround(host_->bytes_per_ms() * kSlice_ms)) : size_bytes;
    while (size_bytes > 0) {
      const int64_t slice_bytes = std::min(size_bytes, most_bytes);
      const Clock::time_point from = through;
      if (link_) through = std::max(through, link_->book(slice_bytes, from));
      if (host_) through = std::max(through, host_->book(slice_bytes, from));
      std::this_thread::sleep_until(through);
      size_bytes -= slice_bytes;
    }
    through_at_ = through;
    awake_at_ = Clock::now();
  }

  MemoryAccount* const account_;
  const Health& health_;
  const std::unique_ptr<LinkThrottle> link_;
  const std::shared_ptr<LinkThrottle> host_;
  const double latency_ms_;
  const Faults* const faults_;
  // Used by the issuing thread only.
  EmulatedTime emulated_;
  Clock::time_point through_at_{};  // when the links had passed the last copy
  Clock::time_point awake_at_{};    // when the issuing thread woke up after it
};

class VirtualDevice final : public Device {
 public:
  VirtualDevice(const DeviceSpec& spec, std::shared_ptr<LinkThrottle> host)
      : Device(spec, c10::Device(c10::DeviceType::CPU)),
        threads_(spec.threads),
        unthrottled_(spec.link_gb_per_s == 0 && spec.host_gb_per_s == 0 && spec.latency_ms == 0),
        account_(make_account(spec.name(), spec.memory_bytes, spec.debug)),
        faults_(spec.name(), spec.faults, *health()),
        compute_(account_, *health(), nullptr, nullptr, 0),
        upload_(account_, *health(), link(spec), host, spec.latency_ms),
        // Downloaded data is host memory, which does not count against this device.
        download_(nullptr, *health(), link(spec), host, spec.latency_ms, &faults_) {}

  Queue& compute() override { return compute_; }
  Queue& upload() override { return upload_; }
  Queue& download() override { return download_; }

  MemoryStats memory() const override {
    return {account_->current_bytes.load(), account_->peak_bytes.load(), memory_limit_bytes(),
            account_->allocated_bytes.load()};
  }
  int64_t memory_limit_bytes() const override { return account_->limit_bytes.load(); }
  void reset_peak_memory() override { account_->peak_bytes.store(account_->current_bytes.load()); }
  void limit_memory(int64_t limit_bytes) override {
    const int64_t now = account_->limit_bytes.load();
    if (now == 0 || limit_bytes < now) account_->limit_bytes.store(limit_bytes);
  }
  bool wants_pinned_host_memory() const override { return false; }
  int threads() const override { return threads_; }
  bool copies_on_compute_cores() const override { return unthrottled_; }
  void begin_microbatch() override { faults_.begin_microbatch(); }
  void inject(const Fault& fault) override { faults_.add(fault); }
  void release_hang() override { faults_.release_hang(); }
  bool hangs() const override { return faults_.hangs(); }

  void poison(const at::Tensor& tensor) override {
    if (account_->poison && tensor.defined() && tensor.nbytes() > 0) {
      std::memset(tensor.data_ptr(), 0xFF, tensor.nbytes());
    }
  }

 private:
  static std::unique_ptr<LinkThrottle> link(const DeviceSpec& spec) {
    return spec.link_gb_per_s > 0 ? std::make_unique<LinkThrottle>(spec.link_gb_per_s) : nullptr;
  }

  const int threads_;
  const bool unthrottled_;
  MemoryAccount* const account_;
  Faults faults_;
  VirtualQueue compute_;
  VirtualQueue upload_;
  VirtualQueue download_;
};

}  // namespace

std::unique_ptr<Device> make_virtual_device(const DeviceSpec& spec, std::shared_ptr<LinkThrottle> host) {
  install_accounting_allocator();
  return std::make_unique<VirtualDevice>(spec, std::move(host));
}

}  // namespace roundpipe::device
