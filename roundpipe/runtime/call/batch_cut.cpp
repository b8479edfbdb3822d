#include <roundpipe/runtime/call/batch_cut.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

namespace {

constexpr const char* kSayHowLabels =
    "; if they are not rows, say how they are cut or that they are whole (RunOptions::cut_labels in C++, split_label "
    "in Python), or cut them yourself";

bool is_automatic(const BatchLeaf& leaf) {
  return leaf.cut.kind == Cut::Kind::kAutomatic && leaf.ready == 0 && leaf.numbers == 0 && !leaf.shape.empty();
}

int64_t sum(const std::vector<int64_t>& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

// The parts of at::tensor_split.
std::vector<int64_t> even_sizes(int64_t size, int count) {
  std::vector<int64_t> sizes;
  for (int m = 0; m < count; ++m) sizes.push_back(size / count + (m < size % count ? 1 : 0));
  return sizes;
}

void require_count(int count) {
  if (count >= 1) return;
  throw std::invalid_argument(
      concat("[inputs] the number of microbatches is ", count, ", expected at least 1; leave it open or give another"));
}

void require_ready(const BatchLeaf& leaf, int count, const char* where) {
  if (leaf.ready == 0 || leaf.ready >= count) return;
  throw std::invalid_argument(concat("[", where, "] ", leaf.name, " is cut into ", leaf.ready,
                                     " microbatches, expected ", count, "; cut it as the others are"));
}

void require_rows_for_each(const BatchLeaf& leaf, int64_t size, int count, const char* where) {
  if (size >= count) return;
  throw std::invalid_argument(concat("[", where, "] ", leaf.name, " has ", size, " rows, fewer than the ", count,
                                     " microbatches, expected at least one row for each; ask for ", size,
                                     " microbatches or fewer"));
}

}  // namespace

int64_t given_dimension(const BatchLeaf& leaf, const char* where) {
  if (leaf.cut.kind != Cut::Kind::kAlong || leaf.ready > 0 || leaf.numbers > 0) return -1;
  const auto rank = static_cast<int64_t>(leaf.shape.size());
  const int64_t dimension = leaf.cut.dimension;
  if (dimension < -rank || dimension >= rank) {
    throw std::invalid_argument(concat("[", where, "] ", leaf.name, " has shape ", at::IntArrayRef(leaf.shape),
                                       ", expected a dimension ", dimension,
                                       " to cut along, as the options say; let it go whole"));
  }
  return dimension < 0 ? dimension + rank : dimension;
}

InputCut::InputCut(std::vector<BatchLeaf> leaves) : leaves_(std::move(leaves)), dimensions_(leaves_.size(), -1) {
  std::vector<size_t> automatic;
  const bool is_ready =
      std::any_of(leaves_.begin(), leaves_.end(), [](const BatchLeaf& leaf) { return leaf.ready > 0; });
  for (size_t i = 0; i < leaves_.size(); ++i) {
    dimensions_[i] = given_dimension(leaves_[i], "inputs");
    if (batch_ < 0 && dimensions_[i] >= 0) batch_ = size(i);
    // Beside values that are cut, a single row stands for all rows of the batch.
    if (is_automatic(leaves_[i]) && !(is_ready && leaves_[i].shape[0] == 1)) automatic.push_back(i);
  }
  choose(automatic);
}

void InputCut::choose(const std::vector<size_t>& automatic) {
  std::map<size_t, int64_t> rows;  // by leaf
  for (const size_t i : automatic) rows[i] = leaves_[i].shape[0];
  std::vector<size_t> doubted = automatic;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (!leaves_[i].ready_rows.empty()) rows[i] = sum(leaves_[i].ready_rows);
  }
  if (batch_ < 0) {
    const auto decides = [&](BatchLeaf::Role role) {
      return std::any_of(rows.begin(), rows.end(), [&](const auto& leaf) { return leaves_[leaf.first].role == role; });
    };
    const auto role = decides(BatchLeaf::Role::kArgument)  ? BatchLeaf::Role::kArgument
                      : decides(BatchLeaf::Role::kKeyword) ? BatchLeaf::Role::kKeyword
                                                           : BatchLeaf::Role::kLabel;
    const auto is_other = [&](size_t leaf) { return leaves_[leaf].role != role; };
    std::map<int64_t, int> frequency;
    for (const auto& [leaf, own] : rows) frequency[own] += is_other(leaf) ? 0 : 1;
    for (const auto& [leaf, own] : rows) {
      if (!is_other(leaf) && (batch_ < 0 || frequency[own] > frequency[batch_])) batch_ = own;
    }
    doubted.erase(std::remove_if(doubted.begin(), doubted.end(), is_other), doubted.end());
  }
  for (const BatchLeaf& leaf : leaves_) {
    if (ready_rows_.empty() && !leaf.ready_rows.empty() && sum(leaf.ready_rows) == batch_)
      ready_rows_ = leaf.ready_rows;
  }
  for (const size_t i : automatic) {
    if (rows[i] == batch_) dimensions_[i] = 0;
  }
  for (const size_t i : doubted) {
    if (rows[i] != batch_ && rows[i] != 1) doubtful_.push_back(i);
  }
}

int InputCut::count(std::optional<int> wanted, int by_default) const {
  int64_t rows = -1;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (dimensions_[i] >= 0) rows = rows < 0 ? size(i) : std::min(rows, size(i));
  }
  if (rows < 0) return wanted.value_or(1);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(rows, wanted.value_or(by_default))));
}

std::vector<LeafCut> InputCut::cut(int count) const {
  require_count(count);
  std::vector<LeafCut> cuts(leaves_.size());
  const BatchLeaf* empty = nullptr;
  bool has_rows = false;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    require_ready(leaves_[i], count, "inputs");
    if (dimensions_[i] < 0) continue;
    if (size(i) > 0) {
      has_rows = true;
    } else if (empty == nullptr) {
      empty = &leaves_[i];
    }
  }
  if (empty != nullptr && !has_rows) {
    throw std::invalid_argument(concat("[inputs] the batch is empty: ", empty->name,
                                       " has no rows, expected at least one; leave such batches out"));
  }
  if (count == 1) return cuts;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const BatchLeaf& leaf = leaves_[i];
    if (dimensions_[i] < 0) {
      if (leaf.role != BatchLeaf::Role::kLabel || !is_automatic(leaf) || batch_ < 0) continue;
      throw std::invalid_argument(
          concat("[labels] ", leaf.name, " has ", leaf.shape[0], " rows (shape ", at::IntArrayRef(leaf.shape),
                 ") and the batch has ", batch_,
                 ", expected a label for each row; if they are not rows, say how they are cut (RunOptions::cut_inputs "
                 "in C++, split_input in Python)"));
    }
    require_rows_for_each(leaf, size(i), count, "inputs");
    const bool follows = !ready_rows_.empty() && size(i) == sum(ready_rows_);
    cuts[i] = {dimensions_[i], follows ? ready_rows_ : even_sizes(size(i), count)};
    cuts[i].sizes.resize(static_cast<size_t>(count));
  }
  return cuts;
}

MicrobatchRows InputCut::rows(int count) const {
  if (batch_ < 0) return std::nullopt;
  if (ready_rows_.empty()) return even_sizes(batch_, count);
  return std::vector<int64_t>(ready_rows_.begin(), ready_rows_.begin() + count);
}

std::string InputCut::doubts() const {
  if (doubtful_.empty()) return "";
  std::string text = "[inputs] some tensors do not have the rows of the batch";
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (dimensions_[i] < 0) continue;
    text += concat(" of ", size(i), " rows, as ", leaves_[i].name);
    break;
  }
  text += ", so every microbatch gets these whole: ";
  for (const size_t i : doubtful_) {
    text += concat(i == doubtful_.front() ? "" : ", ", leaves_[i].name, " ", at::IntArrayRef(leaves_[i].shape));
  }
  return text + "; say how they are cut, or that they are whole (RunOptions::cut_inputs in C++, split_input in Python)";
}

MicrobatchRows rows_of(const std::vector<std::vector<BatchLeaf>>& microbatches) {
  std::vector<int64_t> rows;
  for (const std::vector<BatchLeaf>& leaves : microbatches) {
    const MicrobatchRows own = InputCut(leaves).rows(1);
    if (!own) return std::nullopt;
    rows.push_back(own->front());
  }
  return rows;
}

std::vector<LeafCut> cut_labels(const std::vector<BatchLeaf>& labels, const MicrobatchRows& rows, int count) {
  require_count(count);
  const auto is_checked = [](const BatchLeaf& leaf) {
    return is_automatic(leaf) || (!leaf.ready_rows.empty() && leaf.cut.kind != Cut::Kind::kWhole);
  };
  const auto most_rows = [](const BatchLeaf& leaf) {
    return leaf.ready > 0 ? *std::max_element(leaf.ready_rows.begin(), leaf.ready_rows.end()) : leaf.shape[0];
  };
  int64_t most = 0;
  for (const BatchLeaf& leaf : labels) {
    if (is_checked(leaf)) most = std::max(most, most_rows(leaf));
  }
  std::vector<LeafCut> cuts(labels.size());
  int64_t common = -1;
  for (size_t i = 0; i < labels.size(); ++i) {
    const BatchLeaf& leaf = labels[i];
    require_ready(leaf, count, "labels");
    if (leaf.numbers > 0 && leaf.cut.kind == Cut::Kind::kAutomatic && count > 1) {
      throw std::invalid_argument(concat("[labels] ", leaf.name, " is a sequence of ", leaf.numbers,
                                         " numbers, which is not cut into ", count, " microbatches, expected a tensor",
                                         kSayHowLabels));
    }
    const int64_t given = given_dimension(leaf, "labels");
    if (given >= 0) {
      const int64_t size = leaf.shape[static_cast<size_t>(given)];
      if (count == 1) continue;
      require_rows_for_each(leaf, size, count, "labels");
      cuts[i] = {given, even_sizes(size, count)};
      continue;
    }
    // A single row beside a batch stands for all rows.
    if (!is_checked(leaf) || (most > 1 && most_rows(leaf) == 1)) continue;
    if (leaf.ready > 0) {
      for (size_t m = 0; rows && m < static_cast<size_t>(count); ++m) {
        if (leaf.ready_rows[m] == (*rows)[m]) continue;
        throw std::invalid_argument(concat("[labels] microbatch ", m, " of ", leaf.name, " has ", leaf.ready_rows[m],
                                           " rows, and that of the inputs has ", (*rows)[m],
                                           ", expected a label for each row", kSayHowLabels));
      }
      continue;
    }
    const int64_t own = leaf.shape[0];
    if (rows && sum(*rows) != own) {
      throw std::invalid_argument(concat("[labels] ", leaf.name, " has ", own, " rows (shape ",
                                         at::IntArrayRef(leaf.shape), ") and the batch has ", sum(*rows),
                                         ", expected a label for each row", kSayHowLabels));
    }
    if (!rows && common >= 0 && own != common) {
      throw std::invalid_argument(concat("[labels] ", leaf.name, " has ", own, " rows (shape ",
                                         at::IntArrayRef(leaf.shape), ") and another label has ", common,
                                         ", expected the same number", kSayHowLabels));
    }
    common = own;
    if (count == 1) continue;
    if (!rows) require_rows_for_each(leaf, own, count, "labels");
    cuts[i] = {0, rows ? *rows : even_sizes(own, count)};
  }
  return cuts;
}

}  // namespace roundpipe::runtime
