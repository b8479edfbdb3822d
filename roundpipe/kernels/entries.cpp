#include <roundpipe/kernels/entries.h>

#include <algorithm>

#include <ATen/Parallel.h>

#include <roundpipe/core/instruction_set.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/host_sets.inl>

namespace roundpipe::kernels {
namespace {

static_assert(kBlockThreads == kMostLanes);
// Any card gives so much to a block without being asked.
static_assert((kMostLanes + kWidestNorm) * sizeof(float) <= std::size_t{48} << 10);

template <typename Kernel>
Grid grid_of(const void* arguments) {
  const Kernel& kernel = *static_cast<const Kernel*>(arguments);
  const std::int64_t teams = kMostLanes / kernel.lanes;
  const std::int64_t floats = kMostLanes * Kernel::kNumbers + teams * kernel.floats();
  return {(kernel.items + teams - 1) / teams, floats * static_cast<std::int64_t>(sizeof(float))};
}

template <typename Kernel>
void run_on_host(const void* arguments) {
  const Kernel& kernel = *static_cast<const Kernel*>(arguments);
  constexpr Int64 kGrain = 4 * kMostLanes * kVector;  // elements that are worth a thread
  const Int64 floats = static_cast<Int64>(kernel.lanes) * Kernel::kNumbers + kernel.floats();
  const Int64 of_item = std::max<Int64>(1, static_cast<Int64>(kernel.width) * kernel.most_rows());
  const InstructionSet set = current_instruction_set();
  at::parallel_for(0, kernel.items, std::max<Int64>(1, kGrain / of_item), [&](Int64 begin, Int64 end) {
    std::vector<float> shared(static_cast<std::size_t>(floats));
    switch (set) {
#ifdef __x86_64__
      case InstructionSet::kAvx2:
        return avx2::run_items(kernel, begin, end, shared.data());
      case InstructionSet::kAvx512:
        return avx512::run_items(kernel, begin, end, shared.data());
#endif
      default:
        return baseline::run_items(kernel, begin, end, shared.data());
    }
  });
}

template <typename Kernel>
void translate(void* arguments, const std::function<void*(const void*)>& address) {
  static_cast<Kernel*>(arguments)->addresses(
      [&]<typename... Fields>(Fields&... fields) { ((fields = static_cast<Fields>(address(fields))), ...); });
}

template <typename Kernel>
constexpr Entry made(const char* name, const char* type) {
  return {name, type, sizeof(Kernel), grid_of<Kernel>, run_on_host<Kernel>, translate<Kernel>};
}

}  // namespace

#define ROUNDPIPE_KERNEL(name, ...)                                         \
  template <>                                                               \
  const Entry& entry_of<__VA_ARGS__>() {                                    \
    static constexpr Entry kEntry = made<__VA_ARGS__>(#name, #__VA_ARGS__); \
    return kEntry;                                                          \
  }
#include <roundpipe/kernels/list.inl>
#undef ROUNDPIPE_KERNEL

const std::vector<const Entry*>& entries() {
#define ROUNDPIPE_KERNEL(name, ...) &entry_of<__VA_ARGS__>(),
  static const std::vector<const Entry*> all = {
#include <roundpipe/kernels/list.inl>
  };
  return all;
}

}  // namespace roundpipe::kernels
