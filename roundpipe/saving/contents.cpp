#include <roundpipe/saving/contents.h>

#include <algorithm>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe {

using nlohmann::ordered_json;
using saving::Snapshot;

namespace {

Contents::File lay_out(std::string name, std::vector<CapturedTensor> tensors) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const CapturedTensor& item : tensors) named.emplace_back(item.name, item.tensor);
  files::SafetensorsLayout layout = saving::lay_out(named);
  return {std::move(name), std::move(tensors), std::move(layout)};
}

// The index that transformers reads beside several shards of weights; empty for one file.
std::string index_of(const std::vector<Contents::File>& files) {
  ordered_json weights = ordered_json::object();
  int64_t total = 0;
  for (const Contents::File& file : files) {
    if (!file.name.starts_with(concat(kWeights, "-"))) continue;
    for (const CapturedTensor& item : file.tensors) {
      weights[item.name] = file.name;
      total += static_cast<int64_t>(item.tensor.nbytes());
    }
  }
  if (weights.empty()) return {};
  return files::print_json_as_python({{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weights)}},
                                     "save_checkpoint");
}

}  // namespace

std::string of_rank(const std::string& name, int64_t rank) {
  std::string digits = std::to_string(rank);
  if (digits.size() < 5) digits.insert(0, 5 - digits.size(), '0');
  return concat("rank-", digits, "-", name);
}

void Contents::add(const std::string& section, CapturedTensor tensor) {
  auto found = std::ranges::find(sections_, section, &Section::first);
  if (found == sections_.end()) found = sections_.insert(found, {section, {}});
  found->second.push_back(std::move(tensor));
}

int64_t Contents::plain_bytes() const {
  size_t bytes = 0;
  for (const auto& [name, tensors] : sections_) {
    for (const CapturedTensor& item : tensors) bytes += item.piece ? 0 : item.source().nbytes();
  }
  for (const State* const state : {&common_, &own_}) {
    for (const auto& [name, tensor] : state->encoder.tensors()) bytes += tensor.nbytes();
  }
  return static_cast<int64_t>(bytes);
}

void Contents::copy_plain() {
  for (auto& [name, tensors] : sections_) {
    for (CapturedTensor& item : tensors) {
      if (!item.piece) item.values = item.source().clone();
    }
  }
  for (State* const state : {&common_, &own_}) {
    for (auto& [name, tensor] : state->encoder.tensors()) tensor = tensor.clone();
  }
}

void Contents::set_states(const ordered_json& common, const ordered_json& own) {
  const auto text = [](const ordered_json& state) { return files::print_json_as_python(state, "save_checkpoint"); };
  versions_ = common.at("versions").get<std::map<std::string, std::string>>();
  common_.text = text(common);
  if (size_ == 1) return;
  own_.text = text(own);
  ordered_json same = common;
  for (const char* const name : {"versions", "devices"}) same.erase(name);
  const std::string same_text = text(same);
  fingerprint_ = roundpipe::fingerprint(same_text.data(), same_text.size());
  for (const auto& [name, tensor] : common_.encoder.tensors())
    fingerprint_ = join_fingerprints(fingerprint_, fingerprint_of(tensor));
}

std::map<std::string, uint64_t> Contents::buffer_fingerprints() const {
  std::map<std::string, uint64_t> prints;
  for (const auto& [section, tensors] : sections_) {
    if (section != kWeights && section != kBuffers) continue;
    for (const CapturedTensor& item : tensors) prints[item.name] = fingerprint_of(item.tensor);
  }
  return prints;
}

void Contents::leave_out_buffers(const std::map<std::string, uint64_t>& of_first_rank) {
  const auto found = std::ranges::find(sections_, kBuffers, &Section::first);
  if (found == sections_.end()) return;
  std::erase_if(found->second, [&](const CapturedTensor& item) {
    const auto first = of_first_rank.find(item.name);
    return first != of_first_rank.end() && first->second == fingerprint_of(item.tensor);
  });
  if (found->second.empty()) sections_.erase(found);
}

void Contents::set_snapshot(std::shared_ptr<Snapshot> snapshot, Places places) {
  snapshot_ = std::move(snapshot);
  places_ = std::move(places);
}

void Contents::add_piece(size_t number, const Snapshot::Piece& piece) {
  const PlaceNames& place = places_.at({piece.block, piece.parameter});
  switch (piece.part) {
    case Snapshot::Part::kWeights:
      return add(kWeights, {place.in_file, piece.tensor, number});
    case Snapshot::Part::kPrevious:
      return add(kPrevious, {place.name, piece.tensor, number});
    case Snapshot::Part::kRemainder: {
      const char* const kind = piece.tensor.scalar_type() == at::kFloat ? kMaster : kMasterRemainder;
      return add(kOptimizer, {concat(place.name, "/", kind), piece.tensor, number});
    }
    case Snapshot::Part::kMoment:
      return add(kOptimizer, {concat(place.name, "/", place.moments.at(piece.moment)), piece.tensor, number});
    case Snapshot::Part::kGradient:
      return add(kGradients, {place.name, piece.tensor, number});
  }
}

Contents::SnapshotState Contents::take_snapshot() {
  SnapshotState state;
  snapshot_->wait_ready();
  for (size_t i = 0; i < snapshot_->pieces().size(); ++i) {
    const Snapshot::Piece& piece = snapshot_->pieces()[i];
    add_piece(i, piece);
    // Not of the parameter, which may show nothing while a step is under way.
    if (piece.part == Snapshot::Part::kWeights && !piece.tensor.is_contiguous())
      state.strides[places_.at({piece.block, piece.parameter}).name] = piece.tensor.strides().vec();
  }
  for (const Snapshot::Counters& entry : snapshot_->counters()) {
    const optim::Scalars& scalars = entry.scalars;
    state.counters[places_.at({entry.block, entry.parameter}).name] = {
        {"step", scalars.step}, {"mu_product", scalars.mu_product}, {"eta", scalars.eta}, {"mu", scalars.mu}};
  }
  state.last_norm = snapshot_->last_norm();
  return state;
}

std::vector<Contents::File> Contents::tensor_files(int64_t shard_bytes) const {
  std::vector<File> files;
  for (const auto& [section, tensors] : sections_) {
    const bool is_one = is_adapter_ && section == kWeights;
    const bool is_of_ranks = section == kOptimizer || section == kGradients || (section == kBuffers && rank_ > 0);
    std::vector<int64_t> bytes;
    for (const CapturedTensor& item : tensors) bytes.push_back(static_cast<int64_t>(item.tensor.nbytes()));
    const std::vector<size_t> counts =
        is_one ? std::vector<size_t>{tensors.size()} : saving::shard_counts(bytes, shard_bytes);
    auto first = tensors.begin();
    for (size_t i = 0; i < counts.size(); ++i) {
      const auto last = first + static_cast<std::ptrdiff_t>(counts[i]);
      const std::string name = saving::shard_name(is_one ? "adapter_model" : section, i, counts.size());
      files.push_back(lay_out(size_ > 1 && is_of_ranks ? of_rank(name, rank_) : name, {first, last}));
      first = last;
    }
  }
  const auto add_values = [&](const State& state, std::string name) {
    std::vector<CapturedTensor> values;
    for (const auto& [key, tensor] : state.encoder.tensors()) values.push_back({key, tensor});
    if (!values.empty()) files.push_back(lay_out(std::move(name), std::move(values)));
  };
  if (rank_ == 0) add_values(common_, kStateTensors);
  if (size_ > 1) add_values(own_, of_rank(kStateTensors, rank_));
  return files;
}

std::map<std::string, std::string> Contents::text_files(const std::vector<File>& laid_out) const {
  std::map<std::string, std::string> texts;
  if (rank_ == 0) {
    texts = files;
    const std::string index = index_of(laid_out);
    if (!index.empty()) texts[kIndexFile] = index;
    texts[kStateFile] = common_.text;
  }
  if (size_ > 1) texts[of_rank(kStateFile, rank_)] = own_.text;
  return texts;
}

}  // namespace roundpipe
