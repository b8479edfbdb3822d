#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/saving/contents.h>
#include <roundpipe/saving/stored_checkpoint.h>

namespace roundpipe {

// What a rank takes of what each rank has saved for itself.
//
// With as many ranks as at the save, each takes its own. With another number: a rank that the checkpoint has takes its
// own seeds and random states, and others make new ones, unless all ranks had the same ones; values that were the same
// on all ranks belong to all; the others, and gradients, to nobody. The checkpoint outlives this. Thread safety: one
// thread.
class OwnState {
 public:
  // Of process `rank` of `size` that load the checkpoint.
  OwnState(StoredCheckpoint& stored, int64_t rank, int64_t size);

  // Throws std::invalid_argument for what another number of ranks cannot have; `strict`: also for values that differ.
  void check(bool strict) const;

  // Names of the program's values, in the order in which they were saved; and of those that belong to nobody.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::string>& differing() const { return differing_; }
  StateValue value(const std::string& name) const;

  // Gradients that no step has consumed, and buffers that differ from those of the first rank, by name in the files.
  const StoredCheckpoint::Section& gradients() const { return section(kGradients); }
  const StoredCheckpoint::Section& buffers() const;
  // Counters and seeds of a model in the pipeline, by its path; null if there is none.
  const nlohmann::json* model(const std::string& path) const;
  // What the losses of these gradients were, as JSON: null if there are none, or of one process.
  nlohmann::json loss_counts() const;

  // Whether this rank takes the seed of that model, and the random states; if not, they are those of the first rank,
  // from which it makes its own.
  bool has_seed(const std::string& path) const;
  bool has_random_states() const;
  StateValue random_states() const;

 private:
  const nlohmann::json& state() const { return stored_.state(source_); }
  const StoredCheckpoint::Section& section(const char* name) const;
  bool is_common(const std::string& name) const;

  StoredCheckpoint& stored_;
  const int64_t size_;
  const bool is_there_;
  const int64_t source_;  // the rank whose state this is
  std::vector<std::string> names_, differing_;
};

}  // namespace roundpipe
