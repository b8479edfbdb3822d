#include <roundpipe/training/node_descriptions.h>

#include <unordered_map>

#include <ATen/Context.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/number_text.h>
#include <roundpipe/optim/option_names.h>

namespace roundpipe {

using cluster::NamedTensors;
using cluster::Told;

namespace {

std::string sizes(at::IntArrayRef numbers) {
  std::string text;
  for (const int64_t number : numbers) text += concat(text.empty() ? "" : "x", number);
  return text.empty() ? "one" : text;
}

std::string shape(const at::Tensor& tensor, bool is_parameter) {
  std::string told = concat(sizes(tensor.sizes()), " ", c10::getDtypeNames(tensor.scalar_type()).first);
  if (!is_parameter) return told;
  // The nodes' shards are counted in the order of memory.
  if (!tensor.is_contiguous()) told += concat(", strides ", sizes(tensor.strides()));
  return tensor.requires_grad() ? told : told + ", frozen";
}

void add_group(Told& told, size_t index, const Told& options) {
  for (const auto& [name, value] : options) told.emplace_back(concat(name, " of group ", index), value);
}

}  // namespace

Told describe(const ModelTraits& model, const NamedTensors& parameters, const NamedTensors& buffers) {
  Told told{{"the version of roundpipe", model.version},
            {"the version of torch", model.torch_version},
            {"fp16 accumulation", at::globalContext().allowFP16AccumulationCuBLAS() ? "True" : "False"},
            {"the class", model.kind},
            {"the number of layers", model.layers ? std::to_string(*model.layers) : "None"}};
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  const auto tell = [&](const NamedTensors& named, bool are_parameters) {
    for (const auto& [name, tensor] : named) {
      const auto [known, is_first] = first.try_emplace(tensor.unsafeGetTensorImpl(), name);
      told.emplace_back(name, is_first ? shape(tensor, are_parameters) : concat("the values of ", known->second));
    }
  };
  tell(parameters, true);
  tell(buffers, false);
  return told;
}

Told describe(optim::Algorithm algorithm, const optim::Hyperparameters& options) {
  const optim::OptionNames& names = optim::option_names(algorithm);
  Told told;
  for (const auto& [name, number] : names.numbers) told.emplace_back(name, number_text(options.*number));
  for (const auto& [name, pair] : names.pairs) {
    told.emplace_back(name,
                      concat("(", number_text(options.*pair.first), ", ", number_text(options.*pair.second), ")"));
  }
  for (const auto& [name, flag] : names.flags) told.emplace_back(name, options.*flag ? "true" : "false");
  for (const auto& [name, members] : names.tuples) {
    std::string numbers;
    for (const auto member : members) numbers += concat(numbers.empty() ? "" : ", ", number_text(options.*member));
    told.emplace_back(name, concat("(", numbers, ")"));
  }
  for (const auto& [name, count] : names.counts) told.emplace_back(name, number_text(options.*count));
  for (const auto& choice : names.choices)
    told.emplace_back(choice.name, options.*choice.flag ? choice.on : choice.off);
  return told;
}

Told describe_groups(const std::vector<Told>& groups) {
  Told told;
  for (size_t i = 0; i < groups.size(); ++i) add_group(told, i, groups[i]);
  return told;
}

Told describe(const OptimizerTraits& optimizer, const NamedTensors& named) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, parameter] : named) names.insert_or_assign(parameter.unsafeGetTensorImpl(), name);
  Told told{{"the optimizer", optimizer.kind}};
  for (size_t i = 0; i < optimizer.parameters.size(); ++i) {
    add_group(told, i, optimizer.options.at(i));
    std::string members;
    for (const at::Tensor& parameter : optimizer.parameters[i]) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      members += concat(members.empty() ? "" : ", ", found == names.end() ? "?" : found->second);
    }
    told.emplace_back(concat("the parameters of group ", i),
                      concat(optimizer.parameters[i].size(), " (", members, ")"));
  }
  told.insert(told.end(), optimizer.format.begin(), optimizer.format.end());
  return told;
}

}  // namespace roundpipe
