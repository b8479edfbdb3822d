#include <roundpipe/kernels/card/card_launcher.h>

#include <map>
#include <optional>
#include <string>
#include <unordered_map>

#include <ATen/Context.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/kernels/card/driver.h>
#include <roundpipe/kernels/card/program.h>

namespace roundpipe::kernels::card {
namespace {

template <typename Stream>
constexpr bool kHasHandle = requires(const Stream& stream) { stream.native_handle(); };

// The driver's own stream. Older torches do not tell it.
template <typename Stream>
void* handle_of(const Stream& stream) {
  if constexpr (kHasHandle<Stream>) {
    return stream.native_handle();
  } else {
    return nullptr;
  }
}

class CardLauncher final : public Launcher {
 public:
  std::string why_not(c10::DeviceIndex index) override {
    const MutexLock lock(mutex_);
    const auto [found, is_new] = cards_.try_emplace(index);
    if (is_new) found->second = prepared(index);
    return found->second.why_not;
  }

  void start(const Entry& entry, const void* arguments, const c10::Stream& stream) override {
    Driver::Function function = nullptr;
    {
      const MutexLock lock(mutex_);
      function = cards_.at(stream.device_index()).functions.at(&entry);
    }
    driver_->enter(stream.device_index());
    const Grid grid = entry.grid(arguments);
    void* given[] = {const_cast<void*>(arguments)};
    driver_->check(driver_->launch(function, static_cast<unsigned>(grid.blocks), 1, 1, kBlockThreads, 1, 1,
                                   static_cast<unsigned>(grid.shared_bytes), handle_of(stream), given, nullptr),
                   concat("to start ", entry.name));
  }

 private:
  struct Card {
    std::string why_not;
    std::unordered_map<const Entry*, Driver::Function> functions;
  };

  // Compiles and loads the kernels of a device. Others wait: they would compile the same.
  Card prepared(c10::DeviceIndex index) ROUNDPIPE_REQUIRES(mutex_) {
    Card card;
    if constexpr (!kHasHandle<c10::Stream>) {
      card.why_not = "this torch does not tell the driver's streams; install a newer one";
      return card;
    }
    try {
      if (!driver_) driver_ = at::globalContext().hasROCM() ? rocm_driver() : cuda_driver();
      driver_->enter(index);
      const std::string program = program_for(driver_->compiler(), driver_->architecture(index),
                                              ProgramCache(ProgramCache::folder_of_environment()));
      Driver::Module module = nullptr;  // until the process ends
      driver_->check(driver_->load(&module, program.data()), "to load the kernels");
      for (const Entry* entry : entries()) {
        driver_->check(driver_->find(&card.functions[entry], module, entry->name), concat("to find ", entry->name));
      }
    } catch (const Error& error) {
      card.why_not = error.what();
    }
    return card;
  }

  Mutex mutex_;
  std::map<c10::DeviceIndex, Card> cards_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::optional<Driver> driver_;  // written once, under mutex_, before any card has kernels
};

}  // namespace

Launcher* card_launcher() {
  // Leaked on purpose: kernels may be asked for until the process ends.
  static auto* const launcher = new CardLauncher;
  return launcher;
}

}  // namespace roundpipe::kernels::card
