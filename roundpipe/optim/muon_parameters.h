#pragma once

#include <span>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace roundpipe::optim {

// Whether Muon is for a parameter of a language model, by its role: for the matrices of hidden layers, adapters among
// them. AdamW steps the others: embeddings and the head, whose rows are tokens, norms and biases (has_weight_decay()),
// and whatever has another number of dimensions. Experts that a layer keeps in one tensor ("mlp.experts.down_proj") are
// a stack of matrices, and Muon is for each of them.
//
// An embedding has "embed" in a part of its name, is called "wte" or "wpe", or is a parameter of a class that ends with
// "Embedding"; a head is called "lm_head", "output_layer", "score" or "classifier".
//
// `name`: in the model, with dots between its parts. `classes`: of the module that has the parameter and of its bases,
// without namespaces; empty: not known.
bool is_for_muon(std::string_view name, at::IntArrayRef sizes, std::span<const std::string> classes = {});

}  // namespace roundpipe::optim
