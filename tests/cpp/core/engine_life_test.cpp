#include <roundpipe/core/engine_life.h>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

using namespace roundpipe;

namespace {

// Returns the exit code of a child that evaluates `holds`.
template <typename Question>
int in_child(const Question& holds) {
  const pid_t child = fork();
  if (child == 0) _exit(holds() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool throws(void (*check)()) {
  try {
    check();
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("engine life: a child is left behind if the engine had begun, and so are its children") {
  // In a child, since the engine of this process must go on.
  CHECK(in_child([] {
          bool good = in_child([] { return !is_left_behind() && !throws(&require_engine); }) == 0;
          engine_begins();
          good &= !is_left_behind() && !throws(&require_engine) && !throws(&require_own_process);
          good &= in_child([] {
                    return is_left_behind() && throws(&require_engine) && throws(&require_own_process) &&
                           in_child([] { return is_left_behind(); }) == 0;
                  }) == 0;
          return good;
        }) == 0);
}

TEST_CASE("engine life: once it has ended nothing runs, but there is nothing that waits either") {
  CHECK(in_child([] {
          engine_begins();
          engine_ends();
          return engine_has_ended() && throws(&require_engine) && !throws(&require_own_process);
        }) == 0);
  CHECK_FALSE(engine_has_ended());
}
