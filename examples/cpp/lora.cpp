// Trains LoRA adapters on a Llama, Mistral, Qwen2 or Qwen3 from the folder of a transformers model. PEFT loads them.
//
//   ./lora MODEL_FOLDER TOKEN_FILE ADAPTER_FOLDER
//   ROUNDPIPE_DEVICES=virtual:4 ./lora MODEL_FOLDER TOKEN_FILE ADAPTER_FOLDER 300
//
// `roundpipe tokenize` makes token files. The last argument is the number of steps.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include <roundpipe/roundpipe.h>

namespace tokens = roundpipe::tokens;

namespace {

constexpr int64_t kLength = 512;
constexpr int64_t kRows = 4;  // of a step

void train(const char* folder, const char* token_file, const char* adapter_folder, int64_t steps) {
  roundpipe::LanguageModelOptions options;
  options.lora = {.rank = 16, .alpha = 32, .targets = {"q_proj", "k_proj", "v_proj", "o_proj"}};
  options.layers.attention = roundpipe::models::Attention::kPacked;
  roundpipe::LanguageModel model(folder, options);

  const tokens::TokenFile file(token_file);
  const int64_t length = std::min(kLength, model.max_positions());
  const tokens::Rows rows(file, tokens::part_documents(file, 0).training, length, tokens::RowKind::kPacked);
  tokens::RowOrder order(rows.count(), /*seed=*/0, /*shuffles=*/true);

  roundpipe::Optimizer optimizer(model.model(), torch::optim::AdamWOptions(2e-4));
  optimizer.set_learning_rate(roundpipe::cosine_rate(steps / 10, steps));
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<std::vector<tokens::Piece>> chosen;
    for (int64_t row = 0; row < kRows; ++row) chosen.push_back(rows.row(order.at(step * kRows + row)));
    const roundpipe::LanguageBatch batch = roundpipe::read_batch(file, chosen, rows.kind());
    const double loss = model.forward_backward(batch).loss.item<double>();
    model.model().step(optimizer, {.max_grad_norm = 1.0});
    if (step % 20 == 0 || step + 1 == steps) std::printf("step %3d  loss %.4f\n", static_cast<int>(step), loss);
  }
  model.save_adapter(adapter_folder);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s MODEL_FOLDER TOKEN_FILE ADAPTER_FOLDER [STEPS]\n", argv[0]);
    return 2;
  }
  try {
    train(argv[1], argv[2], argv[3], argc > 4 ? std::atoll(argv[4]) : 100);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
