#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <roundpipe/core/clock.h>
#include <roundpipe/device/device.h>

namespace roundpipe::runtime::support {

// A queue whose host issues ahead, as on an accelerator: emulated work runs later, one piece after the other, and
// events fire when the queue reaches them. Values are computed at once.
class LateQueue final : public device::Queue {
 public:
  explicit LateQueue(device::Queue& inner) : inner_(inner), thread_([this] { run(); }) {}
  ~LateQueue() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::unique_ptr<device::QueueScope> enter() override { return inner_.enter(); }
  void copy(const at::Tensor& dst, const at::Tensor& src) override { inner_.copy(dst, src); }
  void uses(const at::Tensor& tensor) override { inner_.uses(tensor); }
  void emulate(double duration_ms) override { reached_ms_ = std::max(reached_ms_, now_ms()) + duration_ms; }
  void signal(device::EventPtr event) override {
    reached_ms_ = std::max(reached_ms_, now_ms());
    {
      std::lock_guard lock(mutex_);
      pending_.emplace_back(reached_ms_, std::move(event));
    }
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
      if (pending_.empty()) return;
      const auto [at_ms, event] = std::move(pending_.front());
      pending_.pop_front();
      lock.unlock();
      // The sleep is not a wait: it sets the speed of the device.
      std::this_thread::sleep_for(from_ms(at_ms - now_ms()));
      event->fire_at(std::min(at_ms, now_ms()));
      lock.lock();
    }
  }

  device::Queue& inner_;
  double reached_ms_ = 0;  // when everything issued so far will be done; issuing thread only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<double, device::EventPtr>> pending_;  // protected by mutex_
  bool stopping_ = false;                                    // protected by mutex_
  std::thread thread_;
};

// A device that computes late.
class LateDevice final : public device::Device {
 public:
  LateDevice(const device::DeviceSpec& spec, std::unique_ptr<device::Device> inner)
      : Device(spec, inner->torch_device()), inner_(std::move(inner)), compute_(inner_->compute()) {}

  device::Queue& compute() override { return compute_; }
  device::Queue& upload() override { return inner_->upload(); }
  device::Queue& download() override { return inner_->download(); }
  device::MemoryStats memory() const override { return inner_->memory(); }
  int64_t memory_limit_bytes() const override { return inner_->memory_limit_bytes(); }
  void reset_peak_memory() override { inner_->reset_peak_memory(); }
  void limit_memory(int64_t limit_bytes) override { inner_->limit_memory(limit_bytes); }
  bool wants_pinned_host_memory() const override { return inner_->wants_pinned_host_memory(); }
  int threads() const override { return inner_->threads(); }
  void poison(const at::Tensor& tensor) override { inner_->poison(tensor); }

 private:
  const std::unique_ptr<device::Device> inner_;
  LateQueue compute_;
};

}  // namespace roundpipe::runtime::support
