#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <roundpipe/models/decoder_layer.h>
#include <roundpipe/models/embedding_layer.h>
#include <roundpipe/models/head_layer.h>

#include "python_values.h"

namespace roundpipe::python {

// One microbatch's way through the native layers of a chain: how each is called. Python makes it before the first layer
// runs, if that is native as well, or once it has run. The structure of what a native layer hands on is made only if
// Python takes it.
class Passage : public std::enable_shared_from_this<Passage> {
 public:
  // `calls`: by number; none: the Python layer runs. `embedding` and `head`: of the parts before and after these.
  // `structure_after(number)` makes the structure of what call `number` hands on, with calls.size() for the head, and
  // the next number for what enters the embedding and leaves it.
  // REQUIRES: the interpreter lock.
  Passage(std::vector<std::optional<models::DecoderCall>> calls, pybind11::object structure_after,
          std::optional<models::EmbeddingCall> embedding, std::optional<models::HeadCall> head)
      : Passage(std::move(calls), share(std::move(structure_after)), std::move(embedding), std::move(head)) {}
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  // The same for one microbatch: `whole` are its documents, and `of_calls` those that each call takes, or null.
  std::shared_ptr<Passage> with_documents(std::shared_ptr<const ops::Documents> whole,
                                          const std::vector<std::shared_ptr<ops::Documents>>& of_calls) const {
    std::vector<std::optional<models::DecoderCall>> calls = calls_;
    for (size_t number = 0; number < calls.size(); ++number) {
      if (calls[number]) calls[number]->documents = of_calls.at(number);
    }
    std::optional<models::EmbeddingCall> embedding = embedding_;
    if (embedding) embedding->documents = std::move(whole);
    return std::shared_ptr<Passage>(new Passage(std::move(calls), make_, std::move(embedding), head_));
  }

  // Null: not native. The call lives as long as the passage. Any thread.
  const models::DecoderCall* call(size_t number) const {
    return number < calls_.size() && calls_[number] ? &*calls_[number] : nullptr;
  }
  const models::EmbeddingCall* embedding() const { return embedding_ ? &*embedding_ : nullptr; }
  const models::HeadCall* head() const { return head_ ? &*head_ : nullptr; }

  // The structure of inputs that enter the native part before the layers. REQUIRES: embedding(), and this was made by
  // with_documents().
  std::shared_ptr<const void> entered() const { return {shared_from_this(), &after_.back()}; }

  // Whether values with this structure are the loss that the native head has computed.
  bool is_loss(const PythonStructure* structure) const {
    return head_ && head_->structure == structure && head_->labels && !head_->gives_logits;
  }

 private:
  Passage(std::vector<std::optional<models::DecoderCall>> calls, SharedObject make,
          std::optional<models::EmbeddingCall> embedding, std::optional<models::HeadCall> head)
      : make_(std::move(make)),
        calls_(std::move(calls)),
        embedding_(std::move(embedding)),
        head_(std::move(head)),
        after_(calls_.size() + 2) {
    for (size_t number = 0; number < after_.size(); ++number) after_[number] = {make_, number, this, nullptr};
    for (size_t number = 0; number < calls_.size(); ++number) {
      if (calls_[number]) calls_[number]->structure = &after_[number];
    }
    if (head_) head_->structure = &after_[calls_.size()];
    if (embedding_) embedding_->structure = &after_.back();
  }

  const SharedObject make_;  // structure_after
  std::vector<std::optional<models::DecoderCall>> calls_;
  std::optional<models::EmbeddingCall> embedding_;
  std::optional<models::HeadCall> head_;
  std::vector<PythonStructure> after_;  // of each call, of the head and of the embedding
};

}  // namespace roundpipe::python
