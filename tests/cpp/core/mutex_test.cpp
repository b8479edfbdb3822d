#include <roundpipe/core/mutex.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <thread>

#include <doctest/doctest.h>

using namespace roundpipe;

namespace {

// The status of a child that runs this.
int status_of(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("ROUNDPIPE_DEBUG_LOCKS", "1", 1);
    std::freopen("/dev/null", "w", stderr);
    std::signal(SIGABRT, SIG_DFL);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace

TEST_SUITE("mutex") {
  TEST_CASE("a thread knows how many locks it holds") {
    Mutex first, second;
    CHECK(locks_held() == 0);
    {
      const MutexLock outer(first);
      const MutexLock inner(second);
      CHECK(locks_held() == 2);
      std::thread([] { CHECK(locks_held() == 0); }).join();
    }
    CHECK(locks_held() == 0);
    Mutex turn(Mutex::Kind::kTurn);
    {
      const MutexLock lock(turn);
      CHECK(locks_held() == 0);
    }
    Condition changed;
    {
      const MutexLock lock(first);
      changed.wait_for(first, 0.01);
      CHECK(locks_held() == 1);
    }
  }

  TEST_CASE("what is the user's does not run under a lock") {
    static Mutex mutex;
    const int without = status_of([] { require_no_locks("a loss"); });
    CHECK((WIFEXITED(without) && WEXITSTATUS(without) == 0));
    const int with = status_of([] {
      const MutexLock lock(mutex);
      require_no_locks("a loss");
    });
    CHECK((WIFSIGNALED(with) && WTERMSIG(with) == SIGABRT));
  }
}
