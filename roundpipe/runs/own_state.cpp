#include <roundpipe/runs/own_state.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

using nlohmann::json;

namespace {

std::string ranks_text(int64_t count) { return count == 1 ? "1 rank" : concat(count, " ranks"); }

// The names of the values in a state's text, which keeps their order.
std::vector<std::string> ordered_names(const std::string& text) {
  std::vector<std::string> names;
  bool is_inside = false;
  const json::parser_callback_t note = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event != json::parse_event_t::key) return depth < 1;
    if (depth == 1) is_inside = parsed == "state";
    if (depth == 2 && is_inside) names.push_back(parsed.get<std::string>());
    return true;
  };
  [[maybe_unused]] const json parsed = json::parse(text, note);
  return names;
}

}  // namespace

OwnState::OwnState(StoredCheckpoint& stored, int64_t rank, int64_t size)
    : stored_(stored), size_(size), is_there_(rank < stored.nodes()), source_(is_there_ ? rank : 0) {
  names_ = ordered_names(stored.state_text(source_));
  if (stored.nodes() == size) return;
  std::set<std::string> all;
  for (int64_t of = 0; of < stored.nodes(); ++of) {
    for (const auto& [name, value] : stored.state(of).at("state").items()) all.insert(name);
  }
  std::ranges::copy_if(all, std::back_inserter(differing_), [&](const std::string& name) { return !is_common(name); });
  std::erase_if(names_, [&](const std::string& name) { return std::ranges::binary_search(differing_, name); });
}

bool OwnState::is_common(const std::string& name) const {
  std::set<uint64_t> prints;
  for (int64_t rank = 0; rank < stored_.nodes(); ++rank) {
    const json& values = stored_.state(rank).at("state");
    if (!values.contains(name)) return false;
    prints.insert(stored_.fingerprint(values.at(name).begin().value(), rank));
  }
  return prints.size() == 1;
}

void OwnState::check(bool strict) const {
  if (stored_.nodes() == size_) return;
  const std::string there = ranks_text(stored_.nodes());
  for (int64_t rank = 0; rank < stored_.nodes(); ++rank) {
    const auto found = stored_.sections(rank).find(kGradients);
    if (found == stored_.sections(rank).end() || found->second.empty()) continue;
    throw std::invalid_argument(concat("[load_checkpoint] ", stored_.folder(),
                                       " has gradients that no step has consumed ('", found->second.begin()->first,
                                       "', of rank ", rank, "), which belong to the batches of ", there,
                                       ", expected the same number of ranks; load a checkpoint that was saved right "
                                       "after a step"));
  }
  if (differing_.empty() || !strict) return;
  throw std::invalid_argument(concat("[load_checkpoint] state '", differing_[0], "' differs between the ", there,
                                     " that have saved ", stored_.folder(),
                                     ", so this number of ranks cannot share it, expected values that are the same on "
                                     "all; give strict=False to leave such values out"));
}

StateValue OwnState::value(const std::string& name) const {
  return stored_.value(state().at("state").at(name).begin().value(), "state." + name, source_);
}

const StoredCheckpoint::Section& OwnState::section(const char* name) const {
  static const StoredCheckpoint::Section none;
  const auto found = stored_.sections(source_).find(name);
  return found == stored_.sections(source_).end() ? none : found->second;
}

const StoredCheckpoint::Section& OwnState::buffers() const {
  static const StoredCheckpoint::Section none;
  return stored_.nodes() == size_ && size_ > 1 ? section(kBuffers) : none;
}

const json* OwnState::model(const std::string& path) const {
  const json& models = state().at("pipelines");
  const auto found = models.find(path);
  return found == models.end() ? nullptr : &*found;
}

json OwnState::loss_counts() const { return stored_.nodes() == size_ ? state().value("loss_counts", json()) : json(); }

bool OwnState::has_seed(const std::string& path) const {
  if (is_there_) return true;
  const auto seed = [&](int64_t rank) {
    const json& models = stored_.state(rank).at("pipelines");
    return models.contains(path) ? models.at(path).at("random_seed") : json();
  };
  bool alike = stored_.nodes() > 1;
  for (int64_t rank = 1; rank < stored_.nodes(); ++rank) alike = alike && seed(rank) == seed(0);
  return alike;
}

bool OwnState::has_random_states() const {
  if (is_there_) return true;
  const auto print = [&](int64_t rank) { return stored_.fingerprint(stored_.state(rank).at("random"), rank); };
  bool alike = stored_.nodes() > 1;
  for (int64_t rank = 1; rank < stored_.nodes(); ++rank) alike = alike && print(rank) == print(0);
  return alike;
}

StateValue OwnState::random_states() const { return stored_.value(state().at("random"), "random", source_); }

}  // namespace roundpipe
