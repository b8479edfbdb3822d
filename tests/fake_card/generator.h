#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace fake_card {

// A card's generator: a seed, and how many operators have drawn since. An operator takes both when it is issued, and
// draws later from a generator of its own that follows from them.
class CardGenerator final : public c10::GeneratorImpl {
 public:
  explicit CardGenerator(c10::DeviceIndex card);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // For one operator: a generator of the CPU that nobody else draws from. REQUIRES: mutex_ is held.
  at::Generator take();

 private:
  CardGenerator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex card);
// The same as take() of `given`, or of the card's default one where nothing is given.
at::Generator take_from(const std::optional<at::Generator>& given, c10::DeviceIndex card);

}  // namespace fake_card
