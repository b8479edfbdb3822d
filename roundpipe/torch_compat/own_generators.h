#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace roundpipe::torch_compat {

// The seed of a generator that nobody has seeded: torch's own.
inline constexpr uint64_t kUnseeded = 67280421310721;

// Random number generators that stand in for torch's default ones, which belong to the whole process.
//
// While a Scope lives, every operator of the thread that takes a generator draws from these where it is given none, or
// a default one. So do the backward passes that the thread begins, on whatever thread autograd runs them. The default
// generators are neither read nor written. Operators that take no generator are not reached: those draw from the
// default one of their device (dropout and attention on cards; none on the host).
// Thread safety: any thread; whoever shares them between threads sees to the order of draws.
class OwnGenerators : public c10::DebugInfoBase {
 public:
  // Every generator begins anew from `seed`, as after torch.manual_seed(seed); so does the one of a Shared.
  void seed(uint64_t seed);
  // The one for `device`; undefined while the device's default one is to be drawn from, see Shared.
  at::Generator of(c10::Device device);

  // Those of this thread; null outside of a Scope.
  static OwnGenerators* current();
  // What the thread draws from: its own one, else the default one of the device.
  static at::Generator drawn_from(c10::Device device);

  // Not to be moved; ends on the thread that made it, innermost first.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<OwnGenerators> generators);

   private:
    c10::DebugInfoGuard info_;
  };

  // While it lives, what is drawn on accelerators comes from their default generators after all. `standard`: the one
  // of the accelerator in question.
  class Shared {
   public:
    Shared(OwnGenerators& generators, const at::Generator& standard);
    ~Shared();
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

   private:
    OwnGenerators& generators_;
  };

 private:
  std::mutex mutex_;
  // Protected by mutex_.
  uint64_t seed_ = kUnseeded;
  std::vector<at::Generator> generators_;  // one a device
  at::Generator shared_;                   // undefined without a Shared
};

}  // namespace roundpipe::torch_compat
