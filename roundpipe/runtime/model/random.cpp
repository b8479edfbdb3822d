#include <roundpipe/runtime/model/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>

namespace roundpipe::runtime {

using torch_compat::OwnGenerators;

namespace {

std::mutex& device_generator_mutex(c10::Device device) {
  static std::array<std::mutex, 128> mutexes;
  return mutexes[static_cast<size_t>(device.index()) % mutexes.size()];
}

}  // namespace

// A device's default generator, while nothing else draws from it. Restores its state on destruction.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(c10::Device device)
      : lock_(device_generator_mutex(device)),
        generator_(at::globalContext().defaultGenerator(device)),
        before_(state()) {}
  ~BorrowedGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  bool moved() const {
    const at::Tensor now = state();
    return now.nbytes() != before_.nbytes() || std::memcmp(now.data_ptr(), before_.data_ptr(), now.nbytes()) != 0;
  }
  const at::Generator& generator() const { return generator_; }

 private:
  at::Tensor state() const {
    at::Generator generator = generator_;
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }

  const std::lock_guard<std::mutex> lock_;
  at::Generator generator_;
  const at::Tensor before_;
};

uint64_t layer_seed(uint64_t base_seed, std::string_view model_name, uint64_t call, int microbatch, int layer) {
  uint64_t seed = mixed(base_seed);
  uint64_t name_hash = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const char c : model_name) name_hash = (name_hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  seed = mixed(seed ^ name_hash);
  seed = mixed(seed ^ call);
  seed = mixed(seed ^ static_cast<uint64_t>(microbatch));
  seed = mixed(seed ^ static_cast<uint64_t>(layer));
  return seed >> 1;  // fits torch.manual_seed's signed 64 bits
}

uint64_t backward_seed(uint64_t forward_seed) { return mixed(forward_seed) >> 1; }

void run_seeded(OwnGenerators& own, SharedDraws& draws, uint64_t seed, c10::Device device,
                const std::function<void()>& body, const std::function<void()>& before_lock) {
  own.seed(seed);
  const int known = draws.state.load();
  if (device.is_cpu() || known == SharedDraws::kNever || known == SharedDraws::kNotInForward) return body();
  if (before_lock) before_lock();
  BorrowedGenerator borrowed(device);
  if (known == SharedDraws::kUnknown) {
    body();
    if (!borrowed.moved()) {
      int unknown = SharedDraws::kUnknown;
      draws.state.compare_exchange_strong(unknown, SharedDraws::kNotInForward);
      return;
    }
    // The first result is thrown away. If the body cannot run twice, it throws, and its draws are known the next time.
    draws.state.store(SharedDraws::kSome);
  }
  const OwnGenerators::Shared shared(own, borrowed.generator());
  own.seed(seed);
  body();
}

DrawsApart::DrawsApart(uint64_t seed, c10::Device device) {
  if (!device.is_cpu()) borrowed_ = std::make_unique<BorrowedGenerator>(device);
  auto generators = std::make_shared<OwnGenerators>();
  generators->seed(seed);
  own_.emplace(std::move(generators));
}
DrawsApart::~DrawsApart() = default;

void run_backward(OwnGenerators& own, const std::vector<SharedDraws*>& draws, uint64_t seed, c10::Device device,
                  const std::function<void()>& body) {
  own.seed(seed);
  const auto any = [&](int state) {
    return std::any_of(draws.begin(), draws.end(),
                       [state](const SharedDraws* of) { return of->state.load() == state; });
  };
  const bool some = any(SharedDraws::kSome);
  if (device.is_cpu() || (!some && !any(SharedDraws::kNotInForward) && !any(SharedDraws::kUnknown))) return body();
  BorrowedGenerator borrowed(device);
  if (some) {
    const OwnGenerators::Shared shared(own, borrowed.generator());
    own.seed(seed);
    body();
  } else {
    body();
    if (borrowed.moved()) {
      for (SharedDraws* of : draws) of->state.store(SharedDraws::kSome);
      throw Error(concat(
          "[backward] something in this backward pass drew random numbers from the default generator of ", device.str(),
          ", which nothing in the forward did, so it could not be seeded; this step is "
          "dropped, the next ones take it into account"));
    }
  }
  for (SharedDraws* of : draws) {
    int forward_only = SharedDraws::kNotInForward;
    of->state.compare_exchange_strong(forward_only, SharedDraws::kNever);
  }
}

}  // namespace roundpipe::runtime
