#include <roundpipe/core/mutex.h>

#include <cstdio>
#include <cstdlib>

namespace roundpipe {

namespace {

thread_local int held = 0;

}  // namespace

int locks_held() noexcept { return held; }

void detail::count_locks(int more) noexcept { held += more; }

void require_no_locks(const char* what) noexcept {
  static const bool is_asked = std::getenv("ROUNDPIPE_DEBUG_LOCKS") != nullptr;
  if (!is_asked || held == 0) return;
  std::fprintf(stderr, "[debug locks] %s is about to run with %d of the engine's locks held, expected none\n", what,
               held);
  std::abort();
}

}  // namespace roundpipe
