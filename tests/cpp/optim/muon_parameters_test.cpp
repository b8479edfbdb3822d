#include <roundpipe/optim/muon_parameters.h>

#include <string>
#include <vector>

#include <doctest/doctest.h>

using roundpipe::optim::is_for_muon;

TEST_CASE("Muon's parameters: the matrices of layers") {
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate.weight", "transformer.h.3.mlp.c_fc.weight",
        "layers.0.self_attn.q_proj.lora_A.default.weight", "0.weight"}) {
    CAPTURE(name);
    CHECK(is_for_muon(name, {8, 4}));
    CHECK_FALSE(is_for_muon(name, {8}));
    CHECK_FALSE(is_for_muon(name, {8, 1, 4}));
  }
  CHECK(is_for_muon("layers.0.mlp.experts.gate_up_proj", {2, 8, 4}));
}

TEST_CASE("Muon's parameters: no embeddings, heads, norms and biases") {
  for (const char* name :
       {"model.embed_tokens.weight", "transformer.wte.weight", "transformer.wpe.weight", "word_embeddings.weight",
        "embed_out.weight", "lm_head.weight", "transformer.output_layer.weight", "score.weight", "mixer.A_log",
        "layers.0.mlp.experts.down_proj_bias", "model.norm.weight", "embed_tokens.lora_embedding_A.default"}) {
    CAPTURE(name);
    CHECK_FALSE(is_for_muon(name, {8, 4}));
  }
  for (const char* kind : {"Embedding", "EmbeddingImpl", "RMSNorm"}) {
    CAPTURE(kind);
    CHECK_FALSE(is_for_muon("0.weight", {8, 4}, std::vector<std::string>{kind, "Module"}));
  }
  CHECK(is_for_muon("0.weight", {8, 4}, std::vector<std::string>{"Linear", "Module"}));
}
