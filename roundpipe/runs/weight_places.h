#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include <roundpipe/runs/model_names.h>
#include <roundpipe/saving/stored_checkpoint.h>

namespace roundpipe {

// At most four names, and how many more there are.
std::string some_names(const std::vector<std::string>& names);

// The parameters and buffers that both a checkpoint and a model have. Both outlive this. Thread safety: one thread.
class WeightPlaces {
 public:
  WeightPlaces(const StoredCheckpoint& stored, const ModelNames& names);

  // By its name in the model, where each of them is in the files: its section and name there.
  using Source = std::pair<std::string, std::string>;
  const std::map<std::string, Source>& sources() const { return sources_; }
  // Names that only the model has, in its order; and that only the checkpoint has, as its files have them.
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& unexpected() const { return unexpected_; }

  // Throws std::invalid_argument for weights that do not fit, before anything is changed: if `strict`, names that only
  // one of both has; other shapes; frozen parameters of another base than at the save. `names`: those of the model.
  void check(const ModelNames& names, bool strict) const;
  c10::ScalarType dtype(const std::string& name) const;

  // Reads the values into the model's own tensors, cast where dtypes differ, but for the names in `except_for`.
  // `beside`: more to read, so that each file is read once.
  void load(const std::set<std::string>& except_for, StoredCheckpoint::Destinations beside) const;

 private:
  const StoredCheckpoint& stored_;
  NamedParameters targets_;  // buffers, then parameters
  std::map<std::string, Source> sources_;
  std::vector<std::string> missing_, unexpected_;
};

}  // namespace roundpipe
