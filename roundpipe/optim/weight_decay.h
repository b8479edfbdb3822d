#pragma once

#include <span>
#include <string>
#include <string_view>

namespace roundpipe::optim {

// Whether weight decay counts for a parameter, by its role and whatever its shape: not for norms and biases. It is the
// rule of transformers' Trainer, by the parameter's name and the class of its module, and knows more classes.
//
// A bias has "bias" in its name ("mlp.experts.down_proj_bias"); attention sinks ("self_attn.sinks"), which are biases
// of logits, count as well. A norm has "layernorm" or "rmsnorm" in its name, a part "norm", or a part that ends with
// "_norm"; or it is a parameter of a class that ends with "Norm", as "RMSNorm", "BatchNorm2d" and "LayerNormImpl" do.
// Letters of names may be large or small.
//
// `name`: in the model, with dots between its parts. `classes`: of the module that has the parameter and of its bases,
// without namespaces; empty: not known.
bool has_weight_decay(std::string_view name, std::span<const std::string> classes = {});

}  // namespace roundpipe::optim
