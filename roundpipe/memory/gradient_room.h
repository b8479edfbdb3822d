#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::memory {

// Bounds the host memory of gradients that are used as they land: a transfer of gradients to the host waits until
// there is room for it, which the updates of other blocks make.
//
// Nothing waits for ever. If no transfer and no update that has room is under way, none will make any: then the next
// transfer goes on beyond the limit as soon as a thread of the user waits for the engine. Until then, the user may
// still begin the step whose updates make room. Thread safety: any thread. Nothing blocks, and events fire without a
// lock.
class GradientRoom : public std::enable_shared_from_this<GradientRoom> {
 public:
  static std::shared_ptr<GradientRoom> make(int64_t limit_bytes);

  int64_t limit_bytes() const;

  // Room for the gradients of one transfer.
  class Share {
   public:
    Share(std::shared_ptr<GradientRoom> room, int64_t bytes) : room_(std::move(room)), bytes_(bytes) {}
    ~Share() { give_back(); }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // Fires when the transfer may begin, or when the share is given back before.
    const device::EventPtr& granted() const { return granted_; }
    // The transfer is over, and nobody uses the gradients yet.
    void arrived() noexcept { become(State::kHere); }
    // What gives this memory back has been handed in, and will be done. Then arrived() does nothing.
    void is_used() noexcept { become(State::kUsed); }
    // The memory is free, or is that of weights which were elsewhere until now. Nothing more happens then.
    void give_back() noexcept { become(State::kGivenBack); }

   private:
    friend class GradientRoom;
    enum class State { kWaiting, kMoving, kHere, kUsed, kGivenBack };
    void become(State next) noexcept;

    const std::shared_ptr<GradientRoom> room_;
    const int64_t bytes_;
    const device::EventPtr granted_ = device::make_event();
    State state_ = State::kWaiting;  // guarded by the room's mutex; never goes back
  };
  using SharePtr = std::shared_ptr<Share>;

  // The next one in turn.
  SharePtr ask(int64_t bytes);

  // From now on, there is room for everything: no step will come.
  void open() noexcept;

  // What shares have at most had at once.
  int64_t most_bytes() const;

 private:
  explicit GradientRoom(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Grants what there is room for.
  void grant() noexcept;

  mutable Mutex mutex_;  // of all below, and of the shares' states
  int64_t limit_bytes_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::deque<Share*> waiting_ ROUNDPIPE_GUARDED_BY(mutex_);
  int64_t bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // of shares that do not wait
  int64_t most_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  int ending_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // transfers and updates under way
};

// The limit for blocks whose gradients take so many bytes: three of the largest, one that lands, one whose update is
// made, and one that is next; less if all take less.
int64_t gradient_room_bytes(const std::vector<int64_t>& block_bytes);

using GradientRoomPtr = std::shared_ptr<GradientRoom>;

}  // namespace roundpipe::memory
