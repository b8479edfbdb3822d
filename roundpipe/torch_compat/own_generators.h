#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <roundpipe/core/mutex.h>

namespace roundpipe::torch_compat {

// The seed of a generator that nobody has seeded: torch's default.
inline constexpr uint64_t kUnseeded = 67280421310721;

// Random number generators that replace torch's default ones, which belong to the whole process.
//
// While a Scope lives, every operator of its thread that takes a generator draws from these if it is given none or a
// default one. Backward passes that the thread starts do the same, on whatever thread autograd runs them. The default
// generators are neither read nor written. Operators without a generator argument are not affected: they draw from the
// default generator of their device (dropout and attention on cards; none on the host).
// Thread safety: any thread. Users that share generators between threads must order the draws themselves.
class OwnGenerators : public c10::DebugInfoBase {
 public:
  // Restarts every generator from `seed`, as torch.manual_seed(seed) does, and the generator of a Shared too.
  void seed(uint64_t seed);
  // The generator for `device`; undefined while a Shared lets the device's default one be used.
  at::Generator of(c10::Device device);

  // Whether an operator has asked for one of them.
  bool any() const;

  // The generators of this thread's Scope; null outside of a Scope.
  static OwnGenerators* current();
  // The generator that this thread draws from: its own or, without one, the device's default.
  static at::Generator drawn_from(c10::Device device);

  // Must not be moved. Ends on the thread that made it, innermost first.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<OwnGenerators> generators);

   private:
    c10::DebugInfoGuard info_;
  };

  // While it lives, draws on accelerators come from their default generators after all. `standard` is the default
  // generator of the accelerator in use.
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
  mutable Mutex mutex_;
  uint64_t seed_ ROUNDPIPE_GUARDED_BY(mutex_) = kUnseeded;
  std::vector<at::Generator> generators_ ROUNDPIPE_GUARDED_BY(mutex_);  // one per device
  at::Generator shared_ ROUNDPIPE_GUARDED_BY(mutex_);                   // undefined without a Shared
};

}  // namespace roundpipe::torch_compat
