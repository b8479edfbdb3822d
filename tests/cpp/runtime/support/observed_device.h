#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <roundpipe/device/device.h>

namespace roundpipe::runtime::support {

// Records which threads use the queues of a device.
class QueueObserver {
 public:
  // Called on the thread that uses the queue, before it does: "enter" or "copy" with the queue's name, "poison" with
  // "slot". Set while nothing runs.
  std::function<void(const std::string& queue, const std::string& what)> on_use;
  // Called before each copy, likewise.
  std::function<void(const std::string& queue, const at::Tensor& src)> on_copy;

  void used(const std::string& queue, const std::string& what) {
    {
      std::lock_guard lock(mutex_);
      threads_[queue].insert(std::this_thread::get_id());
    }
    if (on_use) on_use(queue, what);
  }
  // The number of threads that have issued to the queue.
  size_t threads(const std::string& queue) {
    std::lock_guard lock(mutex_);
    return threads_[queue].size();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::set<std::thread::id>> threads_;  // protected by mutex_
};

class ObservedQueue final : public device::Queue {
 public:
  ObservedQueue(std::string name, device::Queue& inner, QueueObserver& observer)
      : name_(std::move(name)), inner_(inner), observer_(observer) {}

  std::unique_ptr<device::QueueScope> enter() override {
    observer_.used(name_, "enter");
    return inner_.enter();
  }
  void copy(const at::Tensor& dst, const at::Tensor& src) override {
    observer_.used(name_, "copy");
    if (observer_.on_copy) observer_.on_copy(name_, src);
    inner_.copy(dst, src);
  }
  void signal(device::EventPtr event) override {
    observer_.used(name_, "signal");
    inner_.signal(std::move(event));
  }
  void uses(const at::Tensor& tensor) override {
    observer_.used(name_, "uses");
    inner_.uses(tensor);
  }
  void emulate(double duration_ms) override { inner_.emulate(duration_ms); }

 private:
  const std::string name_;
  device::Queue& inner_;
  QueueObserver& observer_;
};

// A device that reports each use to an observer, then performs it. REQUIRES: the observer outlives it.
class ObservedDevice final : public device::Device {
 public:
  ObservedDevice(const device::DeviceSpec& spec, std::unique_ptr<device::Device> inner, QueueObserver& observer)
      : Device(spec, inner->torch_device()),
        inner_(std::move(inner)),
        observer_(observer),
        compute_("compute", inner_->compute(), observer),
        upload_("upload", inner_->upload(), observer),
        download_("download", inner_->download(), observer) {}

  device::Queue& compute() override { return compute_; }
  device::Queue& upload() override { return upload_; }
  device::Queue& download() override { return download_; }
  device::MemoryStats memory() const override { return inner_->memory(); }
  int64_t memory_limit_bytes() const override { return inner_->memory_limit_bytes(); }
  void reset_peak_memory() override { inner_->reset_peak_memory(); }
  void limit_memory(int64_t limit_bytes) override { inner_->limit_memory(limit_bytes); }
  bool copies_on_compute_cores() const override { return inner_->copies_on_compute_cores(); }
  bool wants_pinned_host_memory() const override { return inner_->wants_pinned_host_memory(); }
  int threads() const override { return inner_->threads(); }
  void poison(const at::Tensor& tensor) override {
    if (observer_.on_use) observer_.on_use("slot", "poison");
    inner_->poison(tensor);
  }

 private:
  const std::unique_ptr<device::Device> inner_;
  QueueObserver& observer_;
  ObservedQueue compute_;
  ObservedQueue upload_;
  ObservedQueue download_;
};

}  // namespace roundpipe::runtime::support
