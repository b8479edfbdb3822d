#include <roundpipe/optim/thread_pool.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/numa.h>
#include <roundpipe/optim/cores.h>

namespace roundpipe::optim {
namespace {

// Best effort: an unpinned thread works, too.
void pin(std::thread& thread, int core) {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#endif
}

constexpr int kMostThreads = 4096;

int checked_threads(int threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument(concat("[ThreadPool] got ", threads, " threads, expected 1 to ", kMostThreads,
                                       "; leave it out for the default"));
  }
  return threads;
}

// 0 = not set.
int threads_from_environment() {
  const char* const text = std::getenv("ROUNDPIPE_OPTIM_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const long threads = std::strtol(text, &end, 10);
  if (*end != '\0' || threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument(concat("[ROUNDPIPE_OPTIM_THREADS] got '", text, "', expected a number from 1 to ",
                                       kMostThreads, "; unset it for the default"));
  }
  return static_cast<int>(threads);
}

bool pinned_from_environment() {
  const char* const variable = std::getenv("ROUNDPIPE_OPTIM_PIN");
  const std::string text = variable == nullptr ? "" : variable;
  if (text != "" && text != "0" && text != "1") {
    throw std::invalid_argument(
        concat("[ROUNDPIPE_OPTIM_PIN] got '", text, "', expected 0 or 1; unset it to leave threads unpinned"));
  }
  return text == "1";
}

// Sets the default floating-point environment in this thread as long as it lives.
class DefaultEnvironment {
 public:
  DefaultEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultEnvironment() { std::fesetenv(&before_); }
  DefaultEnvironment(const DefaultEnvironment&) = delete;
  DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace

// One call of for_ranges.
struct ThreadPool::Call {
  Call(int64_t count, int64_t part, const std::function<void(int64_t, int64_t)>& work)
      : count(count), part(part), work(work) {}

  const int64_t count;
  const int64_t part;
  const std::function<void(int64_t, int64_t)>& work;
  std::atomic<int64_t> next = 0;
  Mutex mutex;
  std::exception_ptr error ROUNDPIPE_GUARDED_BY(mutex) = nullptr;

  bool has_work() const { return next.load() < count; }

  void help() {
    const DefaultEnvironment environment;
    for (;;) {
      const int64_t begin = next.fetch_add(part);
      if (begin >= count) return;
      try {
        work(begin, std::min(begin + part, count));
      } catch (...) {
        const MutexLock lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  }
};

struct ThreadPool::Team {
  Mutex turn;  // held by the caller whose call runs

  Mutex mutex;
  Condition changed;
  Call* call ROUNDPIPE_GUARDED_BY(mutex) = nullptr;
  int helping ROUNDPIPE_GUARDED_BY(mutex) = 0;  // threads inside call->help()
  bool stopping ROUNDPIPE_GUARDED_BY(mutex) = false;

  std::vector<std::thread> threads;

  void run() {
    for (;;) {
      Call* current = nullptr;
      {
        const MutexLock lock(mutex);
        while (!stopping && (call == nullptr || !call->has_work())) changed.wait(mutex);
        if (stopping) return;
        current = call;
        ++helping;
      }
      current->help();
      const MutexLock lock(mutex);
      if (--helping == 0) changed.notify_all();
    }
  }

  void stop() {
    {
      const MutexLock lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads, bool pinned)
    : threads_(checked_threads(threads)), process_(getpid()), team_(std::make_unique<Team>()) {
  const std::vector<int> cores = usable_processors();
  try {
    for (int i = 0; i < threads_ - 1; ++i) {
      team_->threads.emplace_back([team = team_.get()] {
        lower_own_priority();
        team->run();
      });
      if (pinned) pin(team_->threads.back(), cores[cores.size() - 1 - static_cast<size_t>(i) % cores.size()]);
    }
  } catch (...) {
    team_->stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (here()) {
    team_->stop();
  } else {
    static_cast<void>(team_.release());  // its threads cannot be joined
  }
}

bool ThreadPool::here() const { return getpid() == process_; }

void ThreadPool::for_ranges(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  if (count <= 0) return;
  if (grain < 1) {
    throw std::invalid_argument(concat("[ThreadPool.for_ranges] got a grain of ", grain, ", expected at least 1"));
  }
  if (threads_ == 1 || count <= grain || !here()) {
    const DefaultEnvironment environment;
    work(0, count);
    return;
  }
  // Several parts per thread, so that a late thread delays the others only a little.
  const int64_t wanted = count / (int64_t{threads_} * 8);
  Call call(count, std::max<int64_t>(1, wanted / grain) * grain, work);
  const MutexLock turn(team_->turn);
  {
    const MutexLock lock(team_->mutex);
    team_->call = &call;
  }
  team_->changed.notify_all();
  call.help();
  {
    const MutexLock lock(team_->mutex);
    team_->call = nullptr;
    while (team_->helping > 0) team_->changed.wait(team_->mutex);
  }
  if (call.error) std::rethrow_exception(call.error);
}

namespace {

// Never destroyed: threads may request the pool, or work in it, when the process ends.
struct Current {
  std::atomic<int> threads{0};  // 0 = from the environment, or the default
  std::atomic<int> device_threads{0};
  std::atomic<bool> pinned{false};
  Mutex mutex;
  std::shared_ptr<ThreadPool> pool ROUNDPIPE_GUARDED_BY(mutex);
  bool by_default ROUNDPIPE_GUARDED_BY(mutex) = false;  // whether the pool has the default number of threads
};
std::atomic<Current*> shared_state = new Current;

// The pool's threads stay in the parent, and its locks may stay locked: a child made by fork() gets a new pool.
void begin_anew() {
  auto* const own = new Current;
  own->threads = shared_state.load()->threads.load();
  own->device_threads = shared_state.load()->device_threads.load();
  own->pinned = shared_state.load()->pinned.load();
  shared_state.store(own);
}
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &begin_anew);

Current& current_pool() { return *shared_state.load(); }

}  // namespace

std::shared_ptr<ThreadPool> ThreadPool::current() {
  const MutexLock lock(current_pool().mutex);
  std::shared_ptr<ThreadPool>& pool = current_pool().pool;
  if (pool) return pool;
  int threads = current_pool().threads.load();
  const bool pinned = threads > 0 ? current_pool().pinned.load() : pinned_from_environment();
  if (threads == 0) threads = threads_from_environment();
  if (threads == 0) {
    threads = default_threads(physical_cores(usable_processors()), current_pool().device_threads.load(),
                              static_cast<int>(memory::memory_nodes().size()));
    current_pool().by_default = true;
  }
  pool = std::make_shared<ThreadPool>(threads, pinned);
  return pool;
}

void ThreadPool::set_current(int threads, bool pinned) {
  auto pool = std::make_shared<ThreadPool>(threads, pinned);
  const MutexLock lock(current_pool().mutex);
  current_pool().threads = threads;
  current_pool().pinned = pinned;
  current_pool().by_default = false;
  current_pool().pool.swap(pool);
}

void ThreadPool::leave_cores(int device_threads) {
  std::shared_ptr<ThreadPool> old;  // declared before the lock: dropping it joins its threads
  const MutexLock lock(current_pool().mutex);
  if (current_pool().device_threads.exchange(device_threads) != device_threads && current_pool().by_default) {
    current_pool().by_default = false;
    old = std::move(current_pool().pool);
  }
}

}  // namespace roundpipe::optim
