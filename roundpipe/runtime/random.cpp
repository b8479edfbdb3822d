#include <roundpipe/runtime/random.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>

namespace roundpipe::runtime {
namespace {

// Held shared by layers that do not draw from the host's generator, alone by those that may.
std::shared_mutex& host_generator_mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

std::mutex& device_generator_mutex(c10::Device device) {
  static std::array<std::mutex, 128> mutexes;
  return mutexes[static_cast<size_t>(device.index()) % mutexes.size()];
}

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

void seed_generator(at::Generator generator, uint64_t seed) {
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Puts a generator's state back on destruction.
class SavedState {
 public:
  explicit SavedState(at::Generator generator) : generator_(std::move(generator)), state_(state_of(generator_)) {}
  ~SavedState() { set_state(generator_, state_); }
  SavedState(const SavedState&) = delete;
  SavedState& operator=(const SavedState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// How often a layer that was not known to draw has been seen to.
std::atomic<uint64_t>& draws_seen() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// Whether the body drew. REQUIRES: the host's generator is held alone.
bool run_alone(RandomUse& use, uint64_t seed, const std::function<void()>& body);

uint64_t mix(uint64_t value) {
  // The finaliser of splitmix64 (Steele, Lea, Flood 2014).
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace

uint64_t layer_seed(uint64_t base_seed, std::string_view model_name, uint64_t call, int microbatch, int layer) {
  uint64_t seed = mix(base_seed);
  uint64_t name_hash = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const char c : model_name) name_hash = (name_hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  seed = mix(seed ^ name_hash);
  seed = mix(seed ^ call);
  seed = mix(seed ^ static_cast<uint64_t>(microbatch));
  seed = mix(seed ^ static_cast<uint64_t>(layer));
  return seed >> 1;  // fits torch.manual_seed's signed 64 bits
}

void with_seeded_generators(RandomUse& use, uint64_t seed, c10::Device device, bool watch,
                            const std::function<void()>& body) {
  std::optional<std::unique_lock<std::mutex>> device_lock;
  std::optional<SavedState> device_state;
  if (!device.is_cpu()) {
    device_lock.emplace(device_generator_mutex(device));
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    device_state.emplace(generator);
    seed_generator(generator, seed);
  }
  const at::Generator& host = at::detail::getDefaultCPUGenerator();
  if (use.state.load() == RandomUse::kNever) {
    std::shared_lock lock(host_generator_mutex());
    if (!watch) return body();
    const uint64_t seen_before = draws_seen().load();
    const at::Tensor before = state_of(host);
    body();
    const bool changed = !same_state(before, state_of(host));
    if (changed) ++draws_seen();
    if (!changed && draws_seen().load() == seen_before) return;
    // One of those that ran beside each other drew after all, unseeded. Nobody knows which, so what each of them
    // computed is thrown away, and they run again, alone.
    lock.unlock();
    if (!device.is_cpu()) seed_generator(at::globalContext().defaultGenerator(device), seed);
    std::unique_lock alone(host_generator_mutex());
    if (changed) set_state(host, before);
    // If it cannot run twice, it throws, and the next time it is taken to be the one.
    use.state.store(RandomUse::kDraws);
    if (!run_alone(use, seed, body)) use.state.store(RandomUse::kNever);
    return;
  }
  std::unique_lock lock(host_generator_mutex());
  run_alone(use, seed, body);
}

namespace {

bool run_alone(RandomUse& use, uint64_t seed, const std::function<void()>& body) {
  const at::Generator& host = at::detail::getDefaultCPUGenerator();
  const SavedState saved(host);
  seed_generator(host, seed);
  const at::Tensor before = state_of(host);
  body();
  const bool drew = !same_state(before, state_of(host));
  if (drew) use.state.store(RandomUse::kDraws);
  int unknown = RandomUse::kUnknown;
  if (!drew) use.state.compare_exchange_strong(unknown, RandomUse::kNever);
  return drew;
}

}  // namespace

BackwardRandomScope::BackwardRandomScope(bool draws) {
  if (draws) {
    alone_ = std::unique_lock(host_generator_mutex());
  } else {
    beside_ = std::shared_lock(host_generator_mutex());
  }
}

}  // namespace roundpipe::runtime
