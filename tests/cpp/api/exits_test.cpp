#include <roundpipe/roundpipe.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "../rounds.h"
#include "support/chain.h"
#include "support/frontend.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

struct OfPool {
  OfPool() { set_devices("virtual:2"); }
};

// A program that uses models. It runs in a process of its own, and most end with things alive.
struct Program : OfPool {
  explicit Program(bool fused) : duel(/*asynchronous=*/true) {
    if (fused) sgd = std::make_unique<Optimizer>(duel.model, PlainTraining::rule());
  }
  void call() { duel.model.forward_backward(batch.inputs, batch.labels, squared_error); }
  Model::Pending submit() { return duel.model.submit(batch.inputs, batch.labels, squared_error); }
  void step() { duel.model.step(*sgd); }

  Duel duel;
  std::unique_ptr<Optimizer> sgd;
  Sample batch = sample(1);
};

// Ends waits on Ctrl+C.
struct OnSignal final : Frontend {
  inline static volatile std::sig_atomic_t asked = 0;
  inline static std::promise<void> thrown;
  void check_interrupt() override {
    if (asked == 0) return;
    asked = 0;
    thrown.set_value();
    throw Interrupted("as by Ctrl+C");
  }
};

// What ends a program that hangs.
constexpr unsigned kSeconds = 60;

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer's own locks stay locked in the child of a process with threads.
constexpr bool kForks = false;
#else
constexpr bool kForks = true;
#endif

// The exit code of a child that does `work` and then ends as a program does whose main returns.
int child_code(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSeconds);
    work();
    std::exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Ends the process with another code if something is not as expected.
void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "not as expected: %s\n", what.c_str());
  _exit(99);
}
void expect_refused(const std::string& says, const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& error) {
    return expect(std::string(error.what()).find(says) != std::string::npos, error.what());
  }
  expect(false, "no error that says " + says);
}

struct Ending {
  std::string name;
  std::function<void()> program;
  int code = 0;           // below 0: the signal
  const char* says = "";  // on stderr; nothing: not a word there
};

template <typename T>
T& kept(T value) {
  static std::optional<T> object;
  return object.emplace(std::move(value));
}

const std::vector<Ending>& endings() {
  static const std::vector<Ending> all = {
      {"without any call", [] { Program(true); }},
      {"after a call whose backward runs", [] { Program(true).call(); }},
      {"after asynchronous steps",
       [] {
         Program program(true);
         for (int step = 0; step < 3; ++step) {
           program.call();
           program.step();
         }
       }},
      {"after steps, with the model alive",
       [] {
         auto& program = kept(std::make_unique<Program>(true));
         for (int step = 0; step < 3; ++step) {
           program->call();
           program->step();
         }
       }},
      {"with batches submitted",
       [] {
         auto& program = kept(std::make_unique<Program>(true));
         auto& pending = kept(std::vector<Model::Pending>());
         for (int i = 0; i < 3; ++i) pending.push_back(program->submit());
       }},
      {"with batches submitted and dropped",
       [] {
         Program program(false);
         for (int i = 0; i < 3; ++i) program.submit();
       }},
      {"with outputs alive", [] { kept(Program(false).duel.model.forward(sample(0).inputs)); }},
      {"with an error that nobody looks at",
       [] {
         auto& program = kept(std::make_unique<Program>(true));
         program->duel.chain.trap->throw_from(2);
         program->submit();
         program->step();
       }},
      {"with devices that replace those at work",
       [] {
         Program program(true);
         program.call();
         set_devices("virtual:3");
         program.submit();
         set_devices("virtual:1");
       }},
      {"by exit",
       [] {
         Program program(true);
         program.call();
         program.step();
         std::exit(3);
       },
       3},
      {"by _exit",
       [] {
         Program program(true);
         program.submit();
         program.step();
         _exit(4);
       },
       4},
      {"by quick_exit",
       [] {
         Program program(true);
         program.submit();
         program.step();
         std::quick_exit(5);
       },
       5},
      {"by exit on another thread",
       [] {
         Program program(true);
         program.call();
         program.step();
         std::thread([] { std::exit(6); }).join();
       },
       6},
      {"with a thread that goes on training",
       [] {
         auto* const program = new Program(true);  // the thread may outlive what is destroyed at exit
         static std::promise<void> begun;
         std::thread([program] {
           try {
             for (int step = 0;; ++step) {
               program->call();
               program->step();
               if (step == 3) begun.set_value();
             }
           } catch (const Error& ended) {
             expect(std::string(ended.what()).find("the engine has ended") != std::string::npos, ended.what());
           }
         }).detach();
         begun.get_future().wait();
       }},
      {"by an exception",
       [] {
         // The test program would catch it.
         Program program(true);
         program.submit();
         program.step();
         std::thread([] { throw OnPurpose("of the program"); }).join();
       },
       -SIGABRT, "of the program"},
      {"by exit in a layer",
       [] {
         Program program(true);
         program.duel.chain.trap->set(2, [](const Tensor&) -> Tensor { std::exit(7); });
         program.call();
       },
       -SIGABRT, "[engine] a layer or a loss function has called exit"},
      {"by exit in a loss",
       [] {
         Program program(false);
         const auto exits = [](const Tensor&) -> Tensor { std::exit(8); };
         program.duel.model.submit(program.batch.inputs, std::tuple<>(), exits).finish();
       },
       -SIGABRT, "[engine] a layer or a loss function has called exit"},
      {"after an interrupt",
       [] {
         set_frontend(std::make_unique<OnSignal>());
         std::signal(SIGINT, [](int) { OnSignal::asked = 1; });
         Program program(true);
         program.duel.chain.trap->set(2, [](const Tensor& value) {
           kill(getpid(), SIGINT);
           OnSignal::thrown.get_future().wait();
           return value;
         });
         try {
           program.call();
           expect(false, "no interrupt");
         } catch (const Interrupted&) {
         }
         program.duel.chain.trap->clear();
         program.call();
         program.step();
         std::exit(130);
       },
       130},
      {"after shut_down",
       [] {
         auto& program = kept(std::make_unique<Program>(true));
         program->call();
         program->step();
         auto& pending = kept(program->submit());
         shut_down();
         shut_down();
         expect_refused("the engine has ended", [&] { program->call(); });
         expect_refused("the engine has ended", [&] { program->duel.model.forward(program->batch.inputs); });
         expect_refused("the engine has ended", [&] { pending.finish(); });
         expect_refused("the engine has ended", [&] { program->step(); });
         expect_refused("the engine has ended", [&] { devices(); });
         expect_refused("the engine has ended", [&] { set_devices("virtual:1"); });
         expect_refused("the engine has ended", [&] { Duel another; });
         program->duel.model.zero_grad();
       }},
      {"with work in an exit handler",
       [] {
         auto& program = kept(std::make_unique<Program>(true));
         program->call();
         std::atexit([] {
           Program late(true);
           late.call();
           late.step();
           late.duel.model.synchronize();
         });
       }},
      {"a child that does nothing",
       [] {
         Program program(true);
         program.submit();
         program.step();
         for (int i = 0; i < 3; ++i) expect(child_code([] {}) == 0, "the child's code");
         program.duel.model.synchronize();
       }},
      {"a child that tries everything",
       [] {
         Program program(true);
         auto pending = program.submit();
         const Tensor outputs = program.duel.model.forward(program.batch.inputs);
         const Step step = program.duel.model.step(*program.sgd, {.max_grad_norm = 1.0});
         const int code = child_code([&] {
           expect_refused("made by fork", [&] { program.call(); });
           expect_refused("made by fork", [&] { program.submit(); });
           expect_refused("made by fork", [&] { program.duel.model.forward(program.batch.inputs); });
           expect_refused("made by fork", [&] { program.step(); });
           expect_refused("made by fork", [&] { program.duel.model.synchronize(); });
           expect_refused("made by fork", [&] { pending.finish(); });
           expect_refused("made by fork", [&] { Duel another; });
           expect_refused("made by fork", [&] { devices(); });
           expect_refused("made by fork", [&] { set_devices("virtual:1"); });
           expect_refused("made by fork", [&] { restore_devices(); });
         });
         expect(code == 0, "the child's code");
         pending.finish();
         outputs.sum().backward();
         step.wait();
         program.duel.model.synchronize();
       }},
      {"a child that drops everything, in the middle of a batch",
       [] {
         auto program = std::make_unique<Program>(true);
         for (int i = 0; i < 3; ++i) {
           auto pending = std::make_unique<Model::Pending>(program->submit());
           const int code = child_code([&] {
             pending.reset();
             program.reset();
           });
           expect(code == 0, "the child's code");
           program->step();
         }
       }},
      {"a child that was made before",
       [] {
         const auto trains = [] {
           Program program(true);
           program.call();
           program.step();
         };
         expect(child_code(trains) == 0, "the child's code");
         trains();
       }},
      {"a child made in a layer",
       [] {
         Program program(true);
         program.duel.chain.trap->set(2, [](const Tensor& value) {
           expect(child_code([] {}) == 0, "the child's code");
           return value;
         });
         program.call();
       }},
  };
  return all;
}

std::string contents(int file) {
  std::string text(static_cast<size_t>(lseek(file, 0, SEEK_END)), '\0');
  lseek(file, 0, SEEK_SET);
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, read(file, text.data(), text.size()))));
  return text;
}

// Runs a program in a child. REQUIRES: this process has no other thread.
void check_ending(const Ending& ending) {
  std::FILE* const errors = std::tmpfile();
  const pid_t child = fork();
  if (child == 0) {
    dup2(fileno(errors), STDERR_FILENO);
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);  // where doctest tells of signals
    at::manual_seed(1);
    alarm(kSeconds);
    ending.program();
    std::exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  const std::string said = contents(fileno(errors));
  std::fclose(errors);
  CAPTURE(said);
  CHECK(code == ending.code);
  if (*ending.says == '\0') {
    CHECK(said.empty());
  } else {
    CHECK(said.find(ending.says) != std::string::npos);
  }
}

}  // namespace

TEST_SUITE("exits") {
  // In a process of its own, since the children of one that has used the engine cannot use it.
  TEST_CASE("programs end cleanly" * doctest::skip()) {
    for (size_t i = 0; i < endings().size(); i += static_cast<size_t>(rounds(2, 1))) {
      const Ending& ending = endings()[i];
      if (!kForks && ending.name.starts_with("a child")) continue;
      CAPTURE(ending.name);
      check_ending(ending);
    }
  }

  TEST_CASE("a process ends cleanly, whatever is running") {
    // Programs that end anywhere, and children that were left behind, keep memory: no leak is looked for.
    const std::string command =
        concat("ASAN_OPTIONS=detect_leaks=0 exec ", std::filesystem::read_symlink("/proc/self/exe").string(),
               " --no-skip -tc='programs end cleanly'");
    CHECK(std::system(command.c_str()) == 0);
  }
}
