#include <roundpipe/training/loss_counts.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include <roundpipe/cluster/message.h>
#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

constexpr const char* kCalls = "calls";
constexpr const char* kSteps = "steps";
constexpr const char* kFailed = "had an error in a call of";

// By LossCounts::Used.
constexpr std::array<const char*, 4> kWords{"None", "a loss of the user", "the model's own loss",
                                            "the model's own loss with num_items_in_batch"};

const char* words(LossCounts::Used used) { return kWords.at(static_cast<size_t>(used)); }

}  // namespace

// What a node tells.
struct LossCounts::Answer {
  std::string kind;
  Used used = Used::kNone;
  double items = 0;
  int64_t labels = 0;   // of a call
  int64_t counted = 0;  // of all calls
  uint64_t digest = 0;  // of a step
  std::string error;    // of a call that has failed
};

void LossCounts::start_over() {
  used_ = Used::kNone;
  items_ = 0;
  labels_ = 0;
  failed_.reset();
}

void LossCounts::forget() {
  std::optional<std::string> failed = std::move(failed_);
  start_over();
  failed_ = std::move(failed);
}

LossCounts::State LossCounts::state() const {
  return {used_ == Used::kNone ? std::nullopt : std::optional<std::string>(words(used_)), items_, labels_};
}

void LossCounts::load(const std::optional<State>& state) {
  Used used = Used::kNone;
  if (state && state->used) {
    const auto found = std::ranges::find(kWords, *state->used);
    if (found == kWords.end()) {
      throw std::invalid_argument(concat("[distributed] the checkpoint's calls since the last step used '",
                                         *state->used, "', expected ", words(Used::kUsers), " or ", words(Used::kMean),
                                         "; load it with the version that has written it"));
    }
    used = static_cast<Used>(found - kWords.begin());
  }
  start_over();
  if (!state) return;
  used_ = used;
  items_ = state->items;
  labels_ = state->labels;
}

void LossCounts::use(Used what) {
  if (used_ != Used::kNone && used_ != what) {
    throw std::invalid_argument(
        concat("[distributed] this call uses ", words(what), " and an earlier one since the last step ", words(used_),
               ", expected one kind: gradients of a user's loss are averaged over the nodes, those of the model's own "
               "are added"));
  }
  used_ = what;
}

double LossCounts::total(int64_t labels, std::optional<double> items) {
  use(items ? Used::kParts : Used::kMean);
  labels_ += labels;
  items_ = items.value_or(0);
  double sum = 0;
  for (const Answer& answer : ask(kCalls, labels, 0)) sum += items ? answer.items : static_cast<double>(answer.labels);
  return sum;
}

double LossCounts::step(const cluster::Told& told) {
  const uint64_t digest = cluster::digest_of(told);
  try {
    std::vector<Answer> answers;
    do {
      answers = ask(kSteps, 0, digest);
    } while (std::ranges::any_of(answers, [](const Answer& answer) { return answer.kind != kSteps; }));
    std::vector<uint64_t> digests;
    for (const Answer& answer : answers) digests.push_back(answer.digest);
    agreement_->compare(digests, kSteps, told, "the same step on every rank");
    refuse_counted_twice(answers);
    const bool is_users = std::ranges::all_of(
        answers, [](const Answer& answer) { return answer.used == Used::kNone || answer.used == Used::kUsers; });
    start_over();
    return is_users ? 1.0 / agreement_->size() : 1.0;
  } catch (...) {
    start_over();
    throw;
  }
}

void LossCounts::tell_failure(std::string error) {
  note_failure(std::move(error));
  try {
    ask(kSteps, 0, 0);
  } catch (const Error&) {
    // A call has failed, as this node knows.
  } catch (const std::invalid_argument&) {
    // Another node does something else, and is told as well.
  }
}

// What all nodes tell; they make calls, or a step.
std::vector<LossCounts::Answer> LossCounts::ask(const char* kind, int64_t labels, uint64_t digest) {
  cluster::Message mine;
  mine.add(static_cast<uint8_t>(used_)).add(items_).add(labels).add(labels_).add(digest).add(failed_.value_or(""));
  std::vector<Answer> answers;
  std::vector<int> failed;
  std::vector<std::string> kinds;
  Used known = Used::kNone;
  bool is_one_kind = true;
  for (const cluster::Agreement::Answer& told :
       agreement_->gather(failed_ ? kFailed : kind, mine.bytes(), {kCalls, kSteps, kFailed})) {
    cluster::MessageReader reader(told.told);
    Answer& answer = answers.emplace_back();
    answer.kind = told.kind;
    answer.used = static_cast<Used>(reader.number<uint8_t>());
    answer.items = reader.number<double>();
    answer.labels = reader.number<int64_t>();
    answer.counted = reader.number<int64_t>();
    answer.digest = reader.number<uint64_t>();
    answer.error = reader.text();
    if (answer.kind == kFailed) failed.push_back(static_cast<int>(answers.size()) - 1);
    kinds.emplace_back(words(answer.used));
    if (known == Used::kNone) known = answer.used;
    is_one_kind &= answer.used == Used::kNone || answer.used == known;
  }
  if (!failed.empty()) {
    start_over();
    throw Error(concat("[distributed] a call of ", agreement_->model(), " failed on ", cluster::ranks_in_words(failed),
                       " (", answers[static_cast<size_t>(failed[0])].error,
                       "), so the gradients of this step do not belong together; expected all nodes to drop them: "
                       "optimizer.zero_grad(), and repeat the step's calls"));
  }
  if (!is_one_kind) {
    start_over();
    throw std::invalid_argument(
        concat("[distributed] the ranks use losses of several kinds in one step: ", cluster::held(kinds),
               "; expected one kind, as a user's loss is averaged over the nodes and the model's own is added"));
  }
  return answers;
}

// Throws std::invalid_argument if every node's number of items was that of all nodes already.
void LossCounts::refuse_counted_twice(const std::vector<Answer>& answers) const {
  int64_t all = 0, most = 0;
  for (const Answer& answer : answers) {
    all += answer.counted;
    most = std::max(most, answer.counted);
  }
  std::vector<double> items;
  for (const Answer& answer : answers) {
    if (answer.used == Used::kParts) items.push_back(answer.items);
  }
  const bool are_all = std::ranges::all_of(items, [&](double given) { return given == static_cast<double>(all); });
  if (items.empty() || all == 0 || !are_all || most == all) return;
  throw std::invalid_argument(
      concat("[distributed] num_items_in_batch was ", items[0],
             " on every rank, which is how many labels they have together, expected each rank's own number: RoundPipe "
             "adds them; drop this step's gradients with optimizer.zero_grad()"));
}

double CallCount::total(int64_t labels, std::optional<double> items) {
  if (!total_) {
    total_ = counts_->total(labels, items);
    const double own = items.value_or(static_cast<double>(labels));
    loss_factor_ = own != 0 ? *total_ / own : 1.0;
    share_ = *total_ != 0 ? own / *total_ : 1.0;
  }
  return *total_;
}

void CallCount::note_failure(std::string error) {
  if (counted()) counts_->note_failure(std::move(error));
}

}  // namespace roundpipe
