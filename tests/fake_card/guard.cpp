// What torch asks a kind of device for: current devices and streams, events, and hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "current.h"
#include "generator.h"
#include "host_memory.h"
#include "kernels.h"
#include "memory.h"

namespace fake_card {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex this_card = 0;
thread_local int64_t this_stream[16] = {};

// What a c10::Event of a card points to; nothing until it is recorded.
struct CardEvent {
  MarkPtr mark;
  c10::DeviceIndex card;
};

const CardEvent* event_of(void* event) { return static_cast<CardEvent*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }

  c10::Device getDevice() const override { return c10::Device(kType, this_card); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { set_current_card(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_card = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return card_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }
  void synchronizeDevice(const c10::DeviceIndex card) const override { synchronize_card(card); }

  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex card = index_of(device);
    return stream(card, this_stream[card]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return stream(index_of(device), pooled_stream(index_of(device), high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream(index_of(device), new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    this_stream[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return &native(given); }
  bool queryStream(const c10::Stream& given) const override {
    check_fault(given.device_index());
    return native(given).idle();
  }
  void synchronizeStream(const c10::Stream& given) const override { native(given).synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    card_allocator()->recordStream(data, given);
  }

  void record(void** event, const c10::Stream& given, const c10::DeviceIndex /*card*/,
              const c10::EventFlag /*flag*/) const override {
    check_fault(given.device_index());
    if (*event == nullptr) *event = new CardEvent;
    *static_cast<CardEvent*>(*event) = {native(given).mark(), given.device_index()};
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event == nullptr) return;
    check_fault(given.device_index());
    native(given).wait_for(event_of(event)->mark);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    check_fault(event_of(event)->card);
    return event_of(event)->mark->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    event_of(event)->mark->wait();
    check_fault(event_of(event)->card);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*card*/) const noexcept override {
    delete static_cast<CardEvent*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*card*/) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "card: both events must be recorded first");
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "card: both events must be completed first");
    return event_of(second)->mark->time_ms() - event_of(first)->mark->time_ms();
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : this_card; }
  static c10::Stream stream(c10::DeviceIndex card, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, card), id);
  }
  static Stream& native(const c10::Stream& given) { return stream_of(given.device_index(), given.id()); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return card_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex card) const override { return has_context(card); }
  c10::DeviceIndex deviceCount() const override { return card_count(); }
  void setCurrentDevice(c10::DeviceIndex card) const override { set_current_card(card); }
  c10::DeviceIndex getCurrentDevice() const override { return this_card; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    const c10::DeviceIndex before = this_card;
    set_current_card(card);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override {
    return card < 0 ? this_card : exchangeDevice(card);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const c10::DeviceIndex card = card_of_address(data);
    TORCH_CHECK(card >= 0, "card: the address is no card's");
    return c10::Device(kType, card);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override { return default_generator(card); }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<CardGenerator>(card < 0 ? this_card : card);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size_bytes);
  }
};

struct Registration {
  Registration() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
};
[[gnu::used]] const Registration registration;

}  // namespace

c10::DeviceIndex current_card() { return this_card; }

void set_current_card(c10::DeviceIndex card) {
  TORCH_CHECK(card >= 0 && card < card_count(), "card: invalid device ordinal ", static_cast<int>(card));
  this_card = card;
}

Stream& current_stream(c10::DeviceIndex card) { return stream_of(card, this_stream[card]); }

}  // namespace fake_card
