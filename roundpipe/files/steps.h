#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/manifest.h>

namespace roundpipe::files {

// Reading a run folder: no lock is taken and nothing is written, so this works beside a running training, and on
// folders that may only be read. Thread safety: any thread.

// "step-120", the name of a checkpoint's folder.
std::string step_name(int64_t step);
// The step of such a name; nothing for any other name, "step-007" among them.
std::optional<int64_t> step_of(std::string_view name);

struct FoundStep {
  int64_t step = 0;
  std::string folder;
  std::string problem;  // empty: the checkpoint is complete
};

// Of a checkpoint that may have been renamed.
inline constexpr int64_t kAnyStep = -1;

// Everything in a run folder that is called like a checkpoint, by step, unchecked. Empty where there is no such folder.
std::vector<FoundStep> named_steps(const std::string& run_folder, FileSystem& files = FileSystem::real());

// Says what is wrong with `found`, whose contents are not read: see require_complete.
void check(FoundStep& found, FileSystem& files = FileSystem::real());

// The manifest of a checkpoint, after a look at every file: it is complete if its manifest is whole and each file is
// there with its size. Contents are not read: verify.h does that. Throws Error that says what is missing.
Manifest require_complete(const std::string& folder, FileSystem& files = FileSystem::real());

// The same of all that named_steps() finds. Links are not followed.
std::vector<FoundStep> find_steps(const std::string& run_folder, FileSystem& files = FileSystem::real());

// The steps of the complete checkpoints, ascending.
std::vector<int64_t> complete_steps(const std::string& run_folder, FileSystem& files = FileSystem::real());

// The newest complete checkpoint's step.
std::optional<int64_t> latest_step(const std::string& run_folder, FileSystem& files = FileSystem::real());

}  // namespace roundpipe::files
