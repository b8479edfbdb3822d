// Runs language models as lines of standard input say, one job a line, of fields `name=value` with tabs between:
//   model=FOLDER [dtype=float32] [attention=packed] [microbatches=2] [loss_chunk=8] [mlp_chunk=8]
//   [arithmetic=exact]
//   [chunk_logit_bytes=1048576] [seed=7]
//   [adapter=FOLDER, or lora=q_proj,up_proj rank=4 alpha=6 rslora=1] [quantise=nf4 keep=down_proj,layers.0]
//   batch=FILE   safetensors of ids, labels, attention_mask and positions; then out=FILE gets the loss, the logits, the
//                gradients of the trained weights, and the seeds [microbatches, layers] that they were computed with
//   moved=1      all that follows is asked of an object that the model was moved from
//   save=FOLDER [file_bytes=1000]   writes the model; save_adapter=FOLDER its adapters; save_merged=FOLDER both in one
// and answers each with a line: "ok" or "error: ...".
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <roundpipe/files/output_file.h>
#include <roundpipe/files/safetensors.h>
#include <roundpipe/language/config.h>
#include <roundpipe/language/language_model.h>
#include <roundpipe/saving/tensor_files.h>

namespace {

using Fields = std::map<std::string, std::string>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
namespace files = roundpipe::files;

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream given(text);
  for (std::string part; std::getline(given, part, ',');) parts.push_back(part);
  return parts;
}

Fields fields_of(const std::string& line) {
  Fields fields;
  std::istringstream parts(line);
  for (std::string part; std::getline(parts, part, '\t');) {
    const size_t equals = part.find('=');
    fields[part.substr(0, equals)] = part.substr(equals + 1);
  }
  return fields;
}

roundpipe::LanguageBatch read_batch(const std::string& path) {
  roundpipe::LanguageBatch batch;
  files::File file = files::FileSystem::real().open_to_read(path);
  for (const auto& entry : files::read_safetensors_header(path).tensors) {
    const at::Tensor tensor = at::empty(entry.shape, at::kLong);
    file.read(entry.offset, tensor.mutable_data_ptr(), entry.bytes);
    if (entry.name == "ids") batch.ids = tensor;
    if (entry.name == "labels") batch.labels = tensor;
    if (entry.name == "attention_mask") batch.attention_mask = tensor;
    if (entry.name == "positions") batch.positions = tensor;
  }
  return batch;
}

void write_tensors(const std::string& path, const NamedTensors& tensors) {
  const auto layout = roundpipe::saving::lay_out(tensors);
  const size_t slash = path.find_last_of('/');
  files::OutputFile file(files::FileSystem::real(), path.substr(0, slash), path.substr(slash + 1), layout.file_bytes);
  file.write_at(0, layout.header.data(), static_cast<int64_t>(layout.header.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    roundpipe::saving::write_tensor({&file, layout.tensors[i].offset}, tensors[i].second);
  }
  file.finish();
}

// Of the call that is made next.
at::Tensor seeds_of(const roundpipe::Model& model, int microbatches) {
  const at::Tensor seeds = at::empty({microbatches, model.layers()}, at::kLong);
  auto values = seeds.accessor<int64_t, 2>();
  for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
    for (int layer = 0; layer < model.layers(); ++layer) {
      values[microbatch][layer] = static_cast<int64_t>(model.layer_seed(model.calls(), microbatch, layer));
    }
  }
  return seeds;
}

void run(Fields& fields) {
  roundpipe::LanguageModelOptions options;
  if (fields.count("dtype")) options.dtype = roundpipe::language::parse_dtype(fields["dtype"], "dtype");
  if (fields.count("attention")) options.layers.attention = roundpipe::models::parse_attention(fields["attention"]);
  if (fields.count("arithmetic")) options.layers.arithmetic = roundpipe::parse_arithmetic(fields["arithmetic"]);
  if (fields.count("chunk_logit_bytes")) {
    options.model.run.chunk_logit_bytes = std::stoll(fields["chunk_logit_bytes"]);
  }
  if (fields.count("loss_chunk")) options.layers.loss_chunk_tokens = std::stoll(fields["loss_chunk"]);
  if (fields.count("mlp_chunk")) options.layers.mlp_chunk_tokens = std::stoll(fields["mlp_chunk"]);
  options.model.run.microbatches = fields.count("microbatches") ? std::stoi(fields["microbatches"]) : 1;
  if (fields.count("adapter")) options.adapter = fields["adapter"];
  if (fields.count("lora")) {
    options.lora.emplace();
    options.lora->targets = parts_of(fields["lora"]);
    options.lora->rank = std::stoll(fields["rank"]);
    options.lora->alpha = std::stod(fields["alpha"]);
    options.lora->rank_stabilized = fields.count("rslora") != 0;
  }
  if (fields.count("quantise")) options.quantise = {fields["quantise"], {}};
  if (fields.count("keep")) options.quantise->keep = parts_of(fields["keep"]);
  if (fields.count("seed")) at::manual_seed(std::stoull(fields["seed"]));
  roundpipe::LanguageModel model(fields["model"], options);
  std::optional<roundpipe::LanguageModel> owner;
  if (fields.count("moved")) owner.emplace(std::move(model));
  if (fields.count("batch")) {
    const roundpipe::LanguageBatch batch = read_batch(fields["batch"]);
    NamedTensors tensors = {{"logits", model.logits(batch)}};
    const roundpipe::EvaluatedLoss evaluated = model.evaluate(batch);
    tensors.emplace_back("evaluated", at::scalar_tensor(evaluated.mean, at::kDouble));
    tensors.emplace_back("seeds", seeds_of(model.model(), options.model.run.microbatches.value()));
    tensors.emplace_back("loss", model.forward_backward(batch).loss);
    model.model().synchronize();
    for (const auto& [name, parameter] : model.model().named_parameters()) {
      if (parameter.requires_grad()) tensors.emplace_back("grad." + name, parameter.grad());
    }
    write_tensors(fields["out"], tensors);
  }
  if (fields.count("save")) {
    roundpipe::language::ModelFolderOptions saving;
    if (fields.count("file_bytes")) saving.most_file_bytes = std::stoll(fields["file_bytes"]);
    saving.replace = fields.count("replace") != 0;
    model.save(fields["save"], saving);
  }
  if (fields.count("save_merged")) model.save_merged(fields["save_merged"]);
  if (fields.count("save_adapter")) model.save_adapter(fields["save_adapter"]);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Fields fields = fields_of(line);
    try {
      run(fields);
      std::cout << "ok" << std::endl;
    } catch (const std::invalid_argument& error) {
      std::cout << "mistake: " << error.what() << std::endl;
    } catch (const std::exception& error) {
      std::cout << "error: " << error.what() << std::endl;
    }
  }
}
