#include "stop_signal.h"

#include <csignal>

namespace roundpipe::train {

namespace {

volatile std::sig_atomic_t noted = 0;

void note(int signal) {
  noted = signal;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  std::signal(SIGINT, note);
  std::signal(SIGTERM, note);
}

StopSignal::~StopSignal() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int StopSignal::signal() const { return noted; }

}  // namespace roundpipe::train
