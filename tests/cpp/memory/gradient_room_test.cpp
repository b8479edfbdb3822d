#include <roundpipe/memory/gradient_room.h>

#include <thread>
#include <vector>

#include <doctest/doctest.h>

using roundpipe::device::Event;
using roundpipe::memory::gradient_room_bytes;
using roundpipe::memory::GradientRoom;
using roundpipe::memory::GradientRoomPtr;

namespace {

bool is_granted(const GradientRoom::SharePtr& share) { return share->granted()->complete(); }

}  // namespace

TEST_CASE("gradient room: what fits goes at once, the rest in turn as room comes back") {
  const GradientRoomPtr room = GradientRoom::make(10);
  const auto a = room->ask(6), b = room->ask(4), c = room->ask(5), d = room->ask(1);
  CHECK(is_granted(a));
  CHECK(is_granted(b));
  CHECK_FALSE(is_granted(c));
  CHECK_FALSE(is_granted(d));  // it would fit after the update of b, but c is first
  b->is_used();
  b->arrived();
  CHECK_FALSE(is_granted(c));
  b->give_back();
  CHECK_FALSE(is_granted(c));
  a->is_used();
  a->give_back();
  CHECK(is_granted(c));
  CHECK(is_granted(d));
  CHECK(room->most_bytes() == 10);
}

TEST_CASE("gradient room: one share is always granted, and a dropped one gives its room back") {
  const GradientRoomPtr room = GradientRoom::make(10);
  auto a = room->ask(100);
  CHECK(is_granted(a));
  auto b = room->ask(1), c = room->ask(2);
  const roundpipe::device::EventPtr of_b = b->granted();
  CHECK_FALSE(of_b->complete());
  b.reset();                // out of turn
  CHECK(of_b->complete());  // whoever waits for it has to learn that its transfer is cancelled
  a.reset();
  CHECK(is_granted(c));
}

TEST_CASE("gradient room: without updates, goes beyond the limit one by one while a user waits, and not before") {
  const GradientRoomPtr room = GradientRoom::make(10);
  const auto a = room->ask(10), b = room->ask(10), c = room->ask(10);
  a->arrived();  // no step has begun that would use it
  CHECK_FALSE(is_granted(b));
  Event over;
  std::thread user([&] { wait_interruptible(over); });
  b->granted()->wait();
  CHECK_FALSE(is_granted(c));  // the transfer of b may be followed by an update
  b->is_used();
  b->arrived();
  CHECK_FALSE(is_granted(c));
  b->give_back();  // a is still there, and nothing will use it
  c->granted()->wait();
  over.fire();
  user.join();
  CHECK(room->most_bytes() == 20);
}

TEST_CASE("gradient room: an open one grants everything") {
  const GradientRoomPtr room = GradientRoom::make(1);
  const auto a = room->ask(5), b = room->ask(5);
  CHECK_FALSE(is_granted(b));
  room->open();
  CHECK(is_granted(b));
}

TEST_CASE("gradient room: many threads, each share used and given back, stay within the limit") {
  const GradientRoomPtr room = GradientRoom::make(30);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&room] {
      for (int i = 0; i < 500; ++i) {
        const GradientRoom::SharePtr share = room->ask(10);
        share->granted()->wait();
        if (i % 2 == 0) share->is_used();
        share->arrived();
        share->give_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(room->most_bytes() <= 30);
}

TEST_CASE("gradient room: three of the largest, at most all") {
  CHECK(gradient_room_bytes({}) == 0);
  CHECK(gradient_room_bytes({5, 7}) == 12);
  CHECK(gradient_room_bytes({5, 7, 1, 4, 6}) == 21);
}
