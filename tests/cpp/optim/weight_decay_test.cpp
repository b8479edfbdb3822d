#include <roundpipe/optim/weight_decay.h>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using roundpipe::optim::has_weight_decay;

TEST_CASE("weight decay: the name tells norms and biases") {
  for (const char* name : {"lm_head.bias", "layers.0.mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_bias",
                           "attention.bias_k", "rnn.bias_ih_l0", "in_proj_bias", "model.norm.weight",
                           "layers.3.self_attn.q_norm.weight", "layers.3.input_layernorm.weight",
                           "encoder.LayerNorm.weight", "mixer.RMSNorm.weight", "norm", "layers.1.self_attn.sinks"}) {
    CAPTURE(name);
    CHECK_FALSE(has_weight_decay(name));
  }
  for (const char* name :
       {"0.weight", "layers.0.mlp.experts.down_proj", "embed_tokens.weight", "normal.weight", "abnorm.weight",
        "self_attn.q_proj.lora_A.weight", "router.weight", "layers.0.scale", "synapses_sinks.weight", ""}) {
    CAPTURE(name);
    CHECK(has_weight_decay(name));
  }
}

TEST_CASE("weight decay: the class of the module tells norms that have other names") {
  const auto decays = [](const std::vector<std::string>& classes) { return has_weight_decay("1.weight", classes); };
  for (const char* name : {"LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "InstanceNorm3d", "MambaRMSNormGated",
                           "LayerNormImpl", "BatchNorm2dImpl"}) {
    CAPTURE(name);
    CHECK_FALSE(decays({name}));
    CHECK_FALSE(decays({"Mine", name, "Module"}));
  }
  for (const char* name : {"Linear", "NormedEmbedding", "NormHead", "NormConvLayer", "Norms", "Impl", "2d"}) {
    CAPTURE(name);
    CHECK(decays({name}));
  }
}
