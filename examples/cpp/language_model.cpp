// Trains a small transformer on the bytes of a text file, from scratch, and lets it go on writing.
//
//   ./language_model TEXT_FILE
//   ROUNDPIPE_DEVICES=virtual:4 ./language_model TEXT_FILE 300
//
// The layers are: an embedding, blocks, and a head that shares the embedding's weights. The second argument is the
// number of steps.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <roundpipe/roundpipe.h>
#include <torch/torch.h>

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

constexpr int64_t kTokens = 256;  // bytes
constexpr int64_t kContext = 64;
constexpr int64_t kWidth = 96;
constexpr int64_t kHeads = 4;
constexpr int kBlocks = 4;
constexpr int64_t kBatch = 16;

struct EmbeddingsImpl : nn::Cloneable<EmbeddingsImpl> {
  EmbeddingsImpl() { reset(); }
  void reset() override {
    tokens = register_module("tokens", nn::Embedding(kTokens, kWidth));
    places = register_module("places", nn::Embedding(kContext, kWidth));
    const torch::NoGradGuard no_grad;
    for (Tensor& weight : parameters()) weight.normal_(0, 0.02);
  }
  Tensor forward(const Tensor& ids) { return tokens(ids) + places(torch::arange(ids.size(1), ids.options())); }
  nn::Embedding tokens{nullptr}, places{nullptr};
};
TORCH_MODULE(Embeddings);

struct BlockImpl : nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    mixed = register_module("mixed", nn::Linear(kWidth, 3 * kWidth));
    attended = register_module("attended", nn::Linear(kWidth, kWidth));
    mlp_norm = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    wide = register_module("wide", nn::Linear(kWidth, 4 * kWidth));
    narrow = register_module("narrow", nn::Linear(4 * kWidth, kWidth));
    dropout = register_module("dropout", nn::Dropout(0.05));
  }
  Tensor forward(const Tensor& x) {
    const int64_t rows = x.size(0), length = x.size(1);
    const auto heads =
        mixed(attention_norm(x)).view({rows, length, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const Tensor seen = torch::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    const Tensor hidden = x + dropout(attended(seen.transpose(1, 2).reshape({rows, length, kWidth})));
    return hidden + dropout(narrow(torch::gelu(wide(mlp_norm(hidden)))));
  }
  nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  nn::Linear mixed{nullptr}, attended{nullptr}, wide{nullptr}, narrow{nullptr};
  nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Block);

Tensor read_bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::tensor(std::vector<int64_t>(bytes.begin(), bytes.end()));
}

// Rows of text, and for each byte the one that follows.
std::pair<Tensor, Tensor> make_batch(const Tensor& text) {
  std::vector<Tensor> rows, following;
  for (int64_t row = 0; row < kBatch; ++row) {
    const int64_t start = torch::randint(text.size(0) - kContext, {1}).item<int64_t>();
    rows.push_back(text.narrow(0, start, kContext));
    following.push_back(text.narrow(0, start + 1, kContext));
  }
  return {torch::stack(rows), torch::stack(following)};
}

Tensor loss_of(const Tensor& logits, const Tensor& label) {
  const auto sum = F::CrossEntropyFuncOptions().reduction(torch::kSum);
  return F::cross_entropy(logits.flatten(0, 1), label.flatten(), sum) / (kBatch * kContext);
}

std::string written(roundpipe::Model& model, const Tensor& beginning, int64_t length) {
  const torch::NoGradGuard no_grad;
  Tensor ids = beginning.unsqueeze(0);
  for (int64_t i = 0; i < length; ++i) {
    const Tensor logits = model.forward(ids.slice(1, std::max<int64_t>(0, ids.size(1) - kContext)));
    ids = torch::cat({ids, torch::multinomial((logits.select(1, -1) / 0.7).softmax(-1), 1)}, 1);
  }
  std::string text;
  for (int64_t i = 0; i < ids.size(1); ++i) text += static_cast<char>(ids[0][i].item<int64_t>());
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TEXT_FILE [STEPS]\n", argv[0]);
    return 2;
  }
  const int steps = argc > 2 ? std::atoi(argv[2]) : 100;
  const Tensor text = read_bytes(argv[1]);
  if (text.size(0) <= kContext) {
    std::fprintf(stderr, "%s has %lld bytes, expected more than %lld\n", argv[1], static_cast<long long>(text.size(0)),
                 static_cast<long long>(kContext));
    return 2;
  }
  torch::manual_seed(0);

  Embeddings embeddings;
  std::vector<Block> blocks(kBlocks);
  nn::LayerNorm norm(nn::LayerNormOptions({kWidth}));
  nn::Linear head(nn::LinearOptions(kWidth, kTokens).bias(false));
  head->weight = embeddings->tokens->weight;  // tied, as in any libtorch program

  std::vector<roundpipe::Layer> layers = {roundpipe::layer(embeddings).named("embeddings")};
  for (const Block& block : blocks) layers.push_back(roundpipe::layer(block));
  layers.push_back(roundpipe::layer(norm).named("norm"));
  layers.push_back(roundpipe::layer(head).named("head"));
  roundpipe::Model model(layers, {.name = "language model"});

  const auto has_no_decay = [](const std::string& name, const Tensor&) {
    return !roundpipe::optim::has_weight_decay(name);
  };
  const roundpipe::UpdateRule rule = torch::optim::AdamWOptions(3e-3).betas({0.9, 0.95}).weight_decay(0.1);
  roundpipe::UpdateRule no_decay = rule;
  no_decay.options.weight_decay = 0;
  roundpipe::Optimizer optimizer(model, rule, {{has_no_decay, no_decay.options}});
  optimizer.set_learning_rate(roundpipe::cosine_rate(steps / 10, steps, 0.1));

  const auto [sample, sample_label] = make_batch(text);
  std::printf("%s\n\n", model.predict_memory(sample, sample_label, loss_of).text().c_str());

  for (int step = 0; step < steps; ++step) {
    const auto [ids, label] = make_batch(text);
    const double loss = model.forward_backward(ids, label, loss_of).loss.item<double>();
    model.step(optimizer, {.max_grad_norm = 1.0});
    if (step % 20 == 0 || step + 1 == steps) std::printf("step %3d  loss %.4f\n", step, loss);
  }
  model.synchronize();
  for (Block& block : blocks) block->eval();
  std::printf("\n%s\n", written(model, text.narrow(0, 0, 24), 120).c_str());
}
