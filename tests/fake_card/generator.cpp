#include "generator.h"

#include <cstring>
#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include "current.h"

namespace fake_card {
namespace {

constexpr uint64_t kStep = 4;  // offsets go on in fours, as those of real cards

struct State {
  uint64_t seed;
  uint64_t offset;
};

}  // namespace

CardGenerator::CardGenerator(c10::DeviceIndex card)
    : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, card),
                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void CardGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t CardGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void CardGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                  state.numel() == sizeof(State) && state.is_contiguous(),
              "card: a generator's state is ", sizeof(State), " bytes on the CPU");
  State read{};
  std::memcpy(&read, state.data(), sizeof(read));
  seed_ = read.seed;
  offset_ = read.offset;
}

c10::intrusive_ptr<c10::TensorImpl> CardGenerator::get_state() const {
  const State written{seed_, offset_};
  const at::Tensor state = at::detail::empty_cpu({sizeof(State)}, at::kByte);
  std::memcpy(state.data_ptr(), &written, sizeof(written));
  return state.getIntrusivePtr();
}

at::Generator CardGenerator::take() {
  uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ULL + offset_;
  mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93ULL;
  offset_ += kStep;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 32));
}

CardGenerator* CardGenerator::clone_impl() const {
  auto* const copy = new CardGenerator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(c10::DeviceIndex card) {
  static auto* const generators = [] {
    auto* const made = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < card_count(); ++index) {
      made->push_back(at::make_generator<CardGenerator>(index));
    }
    return made;
  }();
  return generators->at(static_cast<size_t>(card < 0 ? current_card() : card));
}

at::Generator take_from(const std::optional<at::Generator>& given, c10::DeviceIndex card) {
  at::Generator generator = given && given->defined() ? *given : default_generator(card);
  TORCH_CHECK(generator.device().type() == c10::DeviceType::PrivateUse1, "Expected a '",
              c10::DeviceTypeName(c10::DeviceType::PrivateUse1, true), "' device type for generator but found '",
              generator.device().type(), "'");
  const std::lock_guard lock(generator.mutex());
  return generator.get<CardGenerator>()->take();
}

}  // namespace fake_card
