#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/cluster/control.h>
#include <roundpipe/cluster/differences.h>

namespace roundpipe::cluster {

// The ranks that train one model, as they say to each other what they do with it and what they have. Over one control
// there may be several: then what a rank does with one model is seen by a rank that does something with another.
// Thread safety: that of the control.
class Agreement {
 public:
  // Every rank makes them for the same models in the same order. `model`: its name.
  Agreement(std::shared_ptr<Control> control, const std::string& model);

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }
  // Which model it is, in messages: "model 2 (Llama)".
  const std::string& model() const { return model_; }

  struct Answer {
    std::string kind;  // what the rank is doing
    std::string told;
  };
  // Returns what every rank has told, in the order of the ranks. Collective; for short messages. `kind`: what this rank
  // is doing, in words after its name, such as "wraps"; `beside`: what others may be doing at the same time.
  // Throws std::invalid_argument, on every rank, if one is doing something else, and Error if one does not answer.
  std::vector<Answer> gather(const std::string& kind, std::string_view told,
                             const std::vector<std::string>& beside = {});

  // Throws std::invalid_argument, on every rank, if they have not told the same; the message names what differs and who
  // has it. Collective. `expected`: the end of the message, after "expected".
  void agree(const std::string& kind, const Told& told, const std::string& expected);
  // The same, after the ranks have gathered their digests. Collective if these differ.
  void compare(const std::vector<uint64_t>& digests, const std::string& kind, const Told& told,
               const std::string& expected);

 private:
  const std::shared_ptr<Control> control_;
  const std::string model_;
};

}  // namespace roundpipe::cluster
