#include <roundpipe/optim/dispatch.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe::optim {
namespace {

struct InstructionSet {
  const char* name;
  const kernels::Kernels* kernels;
};

// In ascending order, the best one last. Never destroyed: at exit, a step that is being made still reads it.
const std::vector<InstructionSet>& supported() {
  static const auto& sets = *new std::vector<InstructionSet>([] {
    std::vector<InstructionSet> found = {{"baseline", &kernels::baseline::table}};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      found.push_back({"avx2", &kernels::avx2::table});
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        found.push_back({"avx512", &kernels::avx512::table});
      }
    }
#elif defined(__aarch64__)
    found.push_back({"neon", &kernels::neon::table});
#endif
    return found;
  }());
  return sets;
}

const InstructionSet* find(const std::string& name, const char* where) {
  std::string names;
  for (const InstructionSet& set : supported()) {
    if (name == set.name) return &set;
    names += concat(names.empty() ? "" : ", ", set.name);
  }
  throw std::invalid_argument(concat("[", where, "] got the instruction set '", name,
                                     "', this processor and build run ", names,
                                     "; use one of them, or leave it out for the best"));
}

// Chosen at the first use; null before that.
std::atomic<const InstructionSet*> chosen = nullptr;

const InstructionSet& current() {
  const InstructionSet* set = chosen.load();
  if (set == nullptr) {
    const char* const name = std::getenv("ROUNDPIPE_OPTIM_ISA");
    const InstructionSet* const wanted =
        name == nullptr || *name == '\0' ? &supported().back() : find(name, "ROUNDPIPE_OPTIM_ISA");
    // If another thread has chosen first, its choice counts.
    if (chosen.compare_exchange_strong(set, wanted)) set = wanted;
  }
  return *set;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : supported()) names.emplace_back(set.name);
  return names;
}

std::string instruction_set() { return current().name; }

void set_instruction_set(const std::string& name) { chosen = find(name, "instruction_set"); }

const kernels::Kernels& current_kernels() { return *current().kernels; }

}  // namespace roundpipe::optim
