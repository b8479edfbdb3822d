#include <roundpipe/core/instruction_set.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {
namespace {

struct Named {
  const char* name;
  InstructionSet set;
};

// In ascending order, the best one last. Never destroyed: at exit, a step that is being made still reads it.
const std::vector<Named>& supported() {
  static const auto& sets = *new std::vector<Named>([] {
    std::vector<Named> found = {{"baseline", InstructionSet::kBaseline}};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      found.push_back({"avx2", InstructionSet::kAvx2});
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        found.push_back({"avx512", InstructionSet::kAvx512});
      }
    }
#elif defined(__aarch64__)
    found.push_back({"neon", InstructionSet::kNeon});
#endif
    return found;
  }());
  return sets;
}

const Named* find(const std::string& name, const char* where) {
  std::string names;
  for (const Named& set : supported()) {
    if (name == set.name) return &set;
    names += concat(names.empty() ? "" : ", ", set.name);
  }
  throw std::invalid_argument(concat("[", where, "] got the instruction set '", name,
                                     "', this processor and build run ", names,
                                     "; use one of them, or leave it out for the best"));
}

// Chosen at the first use; null before that.
std::atomic<const Named*> chosen = nullptr;

const Named& current() {
  const Named* set = chosen.load();
  if (set == nullptr) {
    const char* const name = std::getenv("ROUNDPIPE_OPTIM_ISA");
    const Named* const wanted =
        name == nullptr || *name == '\0' ? &supported().back() : find(name, "ROUNDPIPE_OPTIM_ISA");
    // If another thread has chosen first, its choice counts.
    if (chosen.compare_exchange_strong(set, wanted)) set = wanted;
  }
  return *set;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Named& set : supported()) names.emplace_back(set.name);
  return names;
}

InstructionSet current_instruction_set() { return current().set; }

std::string instruction_set() { return current().name; }

void set_instruction_set(const std::string& name) { chosen = find(name, "instruction_set"); }

}  // namespace roundpipe
