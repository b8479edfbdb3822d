#include <roundpipe/memory/gradient_room.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include <roundpipe/core/engine_life.h>

namespace roundpipe::memory {

namespace {

// The rooms that look again when a thread of the user begins to wait. Never destroyed: threads may wait at exit.
struct Rooms {
  Mutex mutex;
  std::vector<std::weak_ptr<GradientRoom>> all ROUNDPIPE_GUARDED_BY(mutex);
};

Rooms& rooms() {
  static auto* const instance = new Rooms;
  return *instance;
}

}  // namespace

std::shared_ptr<GradientRoom> GradientRoom::make(int64_t limit_bytes) {
  const std::shared_ptr<GradientRoom> made(new GradientRoom(limit_bytes));
  {
    const MutexLock lock(rooms().mutex);
    std::erase_if(rooms().all, [](const auto& room) { return room.expired(); });
    rooms().all.push_back(made);
  }
  device::WaitingUser::set_hook([]() noexcept {
    if (is_left_behind()) return;
    std::vector<std::weak_ptr<GradientRoom>> all;
    {
      const MutexLock lock(rooms().mutex);
      all = rooms().all;
    }
    for (const auto& each : all) {
      if (const std::shared_ptr<GradientRoom> room = each.lock()) room->grant();
    }
  });
  return made;
}

GradientRoom::SharePtr GradientRoom::ask(int64_t bytes) {
  auto share = std::make_shared<Share>(shared_from_this(), bytes);
  {
    const MutexLock lock(mutex_);
    waiting_.push_back(share.get());
  }
  grant();
  return share;
}

void GradientRoom::grant() noexcept {
  for (;;) {
    device::EventPtr granted;
    {
      const MutexLock lock(mutex_);
      if (waiting_.empty()) return;
      Share& next = *waiting_.front();
      const bool fits = bytes_ == 0 || bytes_ + next.bytes_ <= limit_bytes_;
      if (!fits && (ending_ > 0 || !device::WaitingUser::any())) return;
      waiting_.pop_front();
      next.state_ = Share::State::kMoving;
      ++ending_;
      bytes_ += next.bytes_;
      most_bytes_ = std::max(most_bytes_, bytes_);
      granted = next.granted_;
    }
    granted->fire();
  }
}

void GradientRoom::Share::become(State next) noexcept {
  if (is_left_behind()) return;
  bool waited = false;
  {
    const MutexLock lock(room_->mutex_);
    if (next <= state_) return;
    if (state_ == State::kWaiting && next != State::kGivenBack) return;
    const auto is_ending = [](State state) { return state == State::kMoving || state == State::kUsed; };
    waited = state_ == State::kWaiting;
    room_->ending_ += static_cast<int>(is_ending(next)) - static_cast<int>(is_ending(state_));
    if (next == State::kGivenBack) {
      if (waited) {
        std::erase(room_->waiting_, this);
      } else {
        room_->bytes_ -= bytes_;
      }
    }
    state_ = next;
  }
  if (waited) granted_->fire();  // so that a transfer that has been cancelled ends
  room_->grant();
}

int64_t gradient_room_bytes(const std::vector<int64_t>& block_bytes) {
  constexpr int64_t kBlocks = 3;
  if (block_bytes.empty()) return 0;
  return std::min(std::accumulate(block_bytes.begin(), block_bytes.end(), int64_t{0}),
                  kBlocks * *std::ranges::max_element(block_bytes));
}

int64_t GradientRoom::limit_bytes() const {
  const MutexLock lock(mutex_);
  return limit_bytes_;
}

void GradientRoom::open() noexcept {
  {
    const MutexLock lock(mutex_);
    limit_bytes_ = std::numeric_limits<int64_t>::max();
  }
  grant();
}

int64_t GradientRoom::most_bytes() const {
  const MutexLock lock(mutex_);
  return most_bytes_;
}

}  // namespace roundpipe::memory
