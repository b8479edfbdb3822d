#include <roundpipe/core/frontend.h>

#include <atomic>
#include <cstdio>
#include <utility>
#include <vector>

namespace roundpipe {
namespace {

Frontend& defaults() {
  static auto* const instance = new Frontend;
  return *instance;
}

// Null: the defaults. Initialised before any code runs, since static objects of programs may set one.
constinit std::atomic<Frontend*> current{nullptr};

}  // namespace

std::string Frontend::said(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

Frontend& frontend() {
  Frontend* const set = current.load();
  return set != nullptr ? *set : defaults();
}

void tell_user(const std::string& notice) {
  if (!frontend().warn(notice)) std::fprintf(stderr, "%s\n", notice.c_str());
}

void set_frontend(std::unique_ptr<Frontend> given) {
  static auto* const kept = new std::vector<std::unique_ptr<Frontend>>;
  current.store(given.get());
  if (given) kept->push_back(std::move(given));
}

}  // namespace roundpipe
