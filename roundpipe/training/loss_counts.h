#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/cluster/agreement.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe {

// What the calls since the last step have used as their losses, on this node and on the others: the weight of each
// node's gradients in a step. A loss of the user is averaged over the nodes, as torch's DistributedDataParallel does. A
// model's own loss is the mean over the labels of all nodes: before each call, the nodes tell each other how many
// labels they have. A node that makes fewer calls than another, or none, answers the other's questions while it steps.
// Thread safety: that of the agreement. Collective means that every node does it, or makes a step.
class LossCounts {
 public:
  explicit LossCounts(std::shared_ptr<cluster::Agreement> agreement) : agreement_(std::move(agreement)) {}

  enum class Used : uint8_t {
    kNone,
    kUsers,  // losses of the user
    kMean,   // the model's own, means over the labels of a call
    kParts   // the model's own, divided by a number of items that the call was given
  };

  // Notes a call whose loss is the user's. Throws std::invalid_argument if an earlier call since the last step used the
  // model's own.
  void note_users_loss() { use(Used::kUsers); }
  // Notes a call whose loss is the model's own, a sum that is divided by nothing. Throws as note_users_loss() does.
  void note_sum() { use(Used::kMean); }

  // What the loss of a call is to be divided by, instead of this node's own number: the labels of all nodes or, with
  // `items`, which the call was given, the sum of these. `labels`: how many of this node's labels count. Collective.
  // Throws std::invalid_argument if the nodes use losses of several kinds, and Error if a call has failed on another.
  double total(int64_t labels, std::optional<double> items);

  // Ends the step's calls, and returns the factor of its gradients' sum. Collective. `told`: what has to be alike.
  // Throws std::invalid_argument if something else is, or the nodes use losses of several kinds, and Error if a call
  // has failed on a node.
  double step(const cluster::Told& told);

  // Forgets the calls since the last step, whose gradients were dropped; not that one has failed.
  void forget();
  // Notes that a call has failed after its labels were counted in the other nodes' losses. `error`: in one line.
  void note_failure(std::string error) { failed_ = std::move(error); }
  // Tells the other nodes, which make a step, that this one cannot: they then make none either. Collective.
  void tell_failure(std::string error);

  // What the calls since the last step have used, for a checkpoint.
  struct State {
    std::optional<std::string> used;
    double items = 0;
    int64_t labels = 0;
  };
  State state() const;
  // Takes what state() has returned; null: there were no calls since the last step. Throws std::invalid_argument if it
  // is of no kind that is known here.
  void load(const std::optional<State>& state);

 private:
  struct Answer;
  void use(Used what);
  std::vector<Answer> ask(const char* kind, int64_t labels, uint64_t digest);
  void refuse_counted_twice(const std::vector<Answer>& answers) const;
  void start_over();

  const std::shared_ptr<cluster::Agreement> agreement_;
  Used used_ = Used::kNone;
  double items_ = 0;    // this node's number of items
  int64_t labels_ = 0;  // that its calls have counted
  std::optional<std::string> failed_;
};

// Counts one call's labels, once, however often the call is cut anew. Thread safety: as LossCounts.
class CallCount {
 public:
  explicit CallCount(std::shared_ptr<LossCounts> counts) : counts_(std::move(counts)) {}

  // See LossCounts::total.
  double total(int64_t labels, std::optional<double> items);
  void note_users_loss() { counts_->note_users_loss(); }
  void note_sum() { counts_->note_sum(); }
  // Notes an error of the call for the other nodes, if they have been told of the call.
  void note_failure(std::string error);

  // Whether the other nodes have been told.
  bool counted() const { return total_.has_value(); }
  // Makes this node's own loss of its part of the loss of all nodes.
  double loss_factor() const { return loss_factor_; }
  // This node's part of what the loss of all nodes counts.
  double share() const { return share_; }

 private:
  const std::shared_ptr<LossCounts> counts_;
  std::optional<double> total_;
  double loss_factor_ = 1.0;
  double share_ = 1.0;
};

// Runs a part of the call, and notes its error for the other nodes. `count` null: there is one node.
template <typename Work>
auto noting_failure(CallCount* count, const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    if (count != nullptr) count->note_failure(frontend().said(error));
    throw;
  }
}

}  // namespace roundpipe
