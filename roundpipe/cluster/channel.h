#pragma once

#include <functional>
#include <memory>

namespace roundpipe::cluster {

// A thread that runs pieces of work in the order in which they were submitted: collectives of one process group, which
// every rank must make in the same order. It ends when the channel is dropped and its work is done.
// Thread safety: any thread. Nothing but drain_all() blocks.
class Channel {
 public:
  Channel();
  // Does not wait for work that was submitted.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // `work` must handle its own errors. May wait for events. Throws std::bad_alloc.
  void submit(std::function<void()> work);

  // Blocks until the work of all channels of this process is done. Not from a channel's thread.
  static void drain_all();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace roundpipe::cluster
