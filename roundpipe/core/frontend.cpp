#include <roundpipe/core/frontend.h>

#include <atomic>
#include <utility>
#include <vector>

namespace roundpipe {
namespace {

Frontend& defaults() {
  static auto* const instance = new Frontend;
  return *instance;
}

std::atomic<Frontend*> current{&defaults()};

}  // namespace

Frontend& frontend() { return *current.load(); }

void set_frontend(std::unique_ptr<Frontend> given) {
  static auto* const kept = new std::vector<std::unique_ptr<Frontend>>;
  current.store(given ? given.get() : &defaults());
  if (given) kept->push_back(std::move(given));
}

}  // namespace roundpipe
