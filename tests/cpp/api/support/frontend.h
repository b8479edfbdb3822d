#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/roundpipe.h>

namespace roundpipe::support {

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The frontend of all tests of the program: interrupts waits when a test asks for it, and keeps warnings while one
// listens.
class TestFrontend final : public Frontend {
 public:
  void check_interrupt() override {
    std::function<void()> now;
    {
      const std::lock_guard lock(mutex_);
      now = std::exchange(interrupt_, nullptr);
    }
    if (now) now();
  }
  bool warn(const std::string& notice) override {
    const std::lock_guard lock(mutex_);
    if (!listens_) return false;
    notices_.push_back(notice);
    return true;
  }

  // The next wait that lasts some time calls `before` and throws Interrupted.
  void interrupt(std::function<void()> before = [] {}) {
    const std::lock_guard lock(mutex_);
    interrupt_ = [before = std::move(before)] {
      before();
      throw Interrupted("as by Ctrl+C");
    };
  }
  // Whether no wait has been interrupted since; there will be none then.
  bool take_back() {
    const std::lock_guard lock(mutex_);
    return std::exchange(interrupt_, nullptr) != nullptr;
  }
  // The warnings while `work` runs.
  std::vector<std::string> notices_of(const std::function<void()>& work) {
    listen(true);
    work();
    listen(false);
    const std::lock_guard lock(mutex_);
    return std::exchange(notices_, {});
  }

 private:
  void listen(bool listens) {
    const std::lock_guard lock(mutex_);
    listens_ = listens;
  }

  std::mutex mutex_;
  std::function<void()> interrupt_;  // Protected by mutex_, as are the next.
  bool listens_ = false;
  std::vector<std::string> notices_;
};

inline TestFrontend& install_frontend() {
  auto made = std::make_unique<TestFrontend>();
  TestFrontend& frontend = *made;
  set_frontend(std::move(made));
  return frontend;
}
// Set before any thread of the engine starts.
inline TestFrontend& test_frontend = install_frontend();

}  // namespace roundpipe::support
