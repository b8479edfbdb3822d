#include <roundpipe/cluster/agreement.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/cluster/message.h>
#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

Agreement::Agreement(std::shared_ptr<Control> control, const std::string& model)
    : control_(std::move(control)), model_(concat("model ", control_->count_model(), " (", model, ")")) {}

std::vector<Agreement::Answer> Agreement::gather(const std::string& kind, std::string_view told,
                                                 const std::vector<std::string>& beside) {
  std::vector<Answer> answers;
  bool fits = true;
  std::string doing;
  for (const std::string& each : control_->exchange(Message().add(kind).add(model_).add(told).bytes())) {
    MessageReader reader(each);
    Answer& answer = answers.emplace_back();
    answer.kind = reader.text();
    const std::string model = reader.text();
    answer.told = reader.text();
    fits &= model == model_ && (answer.kind == kind || std::ranges::find(beside, answer.kind) != beside.end());
    doing += concat(doing.empty() ? "rank " : ", rank ", answers.size() - 1, " ", answer.kind, " ", model);
  }
  if (fits) return answers;
  throw std::invalid_argument(
      concat("[distributed] the ranks do not do the same: ", doing,
             "; expected each to wrap the same models, make the same optimizers and make the same steps in the same "
             "order"));
}

void Agreement::agree(const std::string& kind, const Told& told, const std::string& expected) {
  std::vector<uint64_t> digests;
  for (const Answer& answer : gather(kind, Message().add(digest_of(told)).bytes()))
    digests.push_back(MessageReader(answer.told).number<uint64_t>());
  compare(digests, kind, told, expected);
}

void Agreement::compare(const std::vector<uint64_t>& digests, const std::string& kind, const Told& told,
                        const std::string& expected) {
  if (std::ranges::all_of(digests, [&](uint64_t digest) { return digest == digests.front(); })) return;
  Message mine;
  for (const auto& [name, value] : told) mine.add(name).add(value);
  std::vector<Told> all;
  for (const Answer& answer : gather(kind, mine.bytes())) {
    Told& each = all.emplace_back();
    for (MessageReader reader(answer.told); !reader.is_at_end();) {
      std::string name = reader.text();
      each.emplace_back(std::move(name), reader.text());
    }
  }
  throw std::invalid_argument(
      concat("[distributed] the ranks differ in ", model_, ": ", differences(all), "; expected ", expected));
}

}  // namespace roundpipe::cluster
