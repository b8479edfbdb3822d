#include "launcher.h"

#include <cstddef>
#include <mutex>
#include <vector>

#include <roundpipe/kernels/launcher.h>

#include "kernels.h"
#include "memory.h"

namespace fake_card {
namespace {

class CardLauncher final : public roundpipe::kernels::Launcher {
 public:
  std::string why_not(c10::DeviceIndex /*index*/) override {
    const std::lock_guard lock(mutex_);
    return why_;
  }

  void start(const roundpipe::kernels::Entry& entry, const void* arguments, const c10::Stream& stream) override {
    const c10::DeviceIndex card = stream.device_index();
    const auto* const bytes = static_cast<const std::byte*>(arguments);
    std::vector<std::byte> own(bytes, bytes + entry.bytes);
    entry.translate(own.data(), [&](const void* address) {
      TORCH_CHECK(address == nullptr || card_of_address(address) == card, "card: ", entry.name,
                  " on card:", static_cast<int>(card), " is given an address of ", address, ", which is not there");
      return alias_of(address);
    });
    TORCH_CHECK(&current_stream(card) == &stream_of(card, stream.id()), "card: ", entry.name,
                " is launched on another stream than the current one");
    launch(card, entry.name, [&entry, own = std::move(own)] { entry.run_on_host(own.data()); });
    const std::lock_guard lock(mutex_);
    ++launched_[entry.name];
  }

  void set_why(const std::string& why) {
    const std::lock_guard lock(mutex_);
    why_ = why;
  }
  std::map<std::string, int64_t> launched() {
    const std::lock_guard lock(mutex_);
    return launched_;
  }

 private:
  std::mutex mutex_;
  // Protected by mutex_.
  std::string why_;
  std::map<std::string, int64_t> launched_;
};

CardLauncher* launcher() {
  static auto* const one = new CardLauncher;
  return one;
}

// The engine's library is loaded before this one.
struct LauncherRegistration {
  LauncherRegistration() { roundpipe::kernels::register_launcher(c10::DeviceType::PrivateUse1, launcher()); }
};
[[gnu::used]] const LauncherRegistration launcher_registration;

}  // namespace

void set_kernels_missing(const std::string& why) { launcher()->set_why(why); }

std::map<std::string, int64_t> launched() { return launcher()->launched(); }

}  // namespace fake_card
