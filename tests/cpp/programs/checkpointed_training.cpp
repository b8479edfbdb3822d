// A training that Python's tests have a twin of: test_checkpoints_of_cpp.py.
//   checkpointed_training FOLDER fused|group|torch|copies float32|bfloat16 DEVICES STEPS [resume|try]
// Prints each step's loss, and saves a checkpoint at the end. With `try`, it loads each folder that a line of the input
// names, and prints a line of JSON: the step, the losses of two more steps, or what it threw; and what it told.
#include <sys/resource.h>

#include <array>
#include <cstdio>
#include <iostream>
#include <string>

#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

using namespace roundpipe;
namespace nn = torch::nn;

namespace {

std::string in_json(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    out += letter == '\n' ? ' ' : letter;
  }
  return out + "\"";
}

std::string told;
struct Listener : Frontend {
  bool warn(const std::string& notice) override {
    told += (told.empty() ? "" : ", ") + in_json(notice);
    return true;
  }
};

long peak_kilobytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// `call` returns the loss of one more batch.
template <typename Optimizer, typename Call>
void try_each(Model& model, Optimizer& optimizer, const Call& call) {
  const auto go_on = [&] {
    const double loss = call();
    model.step(optimizer);
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "\"%a\"", loss);
    return std::string(text.data());
  };
  set_frontend(std::make_unique<Listener>());
  for (std::string folder; std::getline(std::cin, folder);) {
    told.clear();
    std::string result, loaded;
    try {
      loaded = concat("\"step\": ", load_checkpoint(folder, model, optimizer).step, ", ");
      const std::string first = go_on(), second = go_on();
      result = concat("\"losses\": [", first, ", ", second, "]");
    } catch (const std::invalid_argument& error) {
      result = concat("\"mistake\": ", in_json(error.what()));
    } catch (const Error& error) {
      result = concat("\"error\": ", in_json(error.what()));
    } catch (const std::exception& error) {
      result = concat("\"unexpected\": ", in_json(error.what()));
    }
    std::cout << "{" << loaded << result << ", \"told\": [" << told << "], \"peak_kilobytes\": " << peak_kilobytes()
              << "}" << std::endl;
  }
}

// A whole with two models and a layer on the host between them.
void train_group(const std::string& folder, int steps, bool resumes) {
  nn::Sequential encoder{nn::Linear(5, 9), nn::Tanh(), nn::Dropout(0.2)};
  nn::Linear bridge(9, 9);
  nn::Sequential decoder{nn::Linear(9, 3)};
  Model first(encoder, {.name = "encoder"}), second(decoder, {.name = "decoder"});
  for (Model* const model : {&first, &second}) model->run_options().microbatches = 3;
  const ModelGroup whole{{{"encoder", &first}, {"decoder", &second}},
                         {{"bridge.weight", bridge->weight}, {"bridge.bias", bridge->bias}}};
  Optimizer optimizer(whole, torch::optim::AdamWOptions(0.02).weight_decay(0.01));
  optimizer.set_learning_rate([](int64_t done) { return 1 / (1 + 0.25 * static_cast<double>(done)); });
  if (resumes) load_checkpoint(folder, whole, optimizer);
  for (int i = 0; i < steps; ++i) {
    const at::Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
    const at::Tensor loss = (second.forward(bridge(first.forward(batch))) - labels).square().sum();
    loss.backward();
    std::printf("%a\n", loss.item<double>());
    optimizer.step();
  }
  save_checkpoint(folder, whole, optimizer, {.state = {{"note", "from C++"}, {"array", at::arange(4)}}, .wait = true});
}

}  // namespace

int main(int /*count*/, char** arguments) {
  const std::string folder = arguments[1], optimizer_kind = arguments[2], dtype_name = arguments[3];
  const at::ScalarType dtype = dtype_name == "float32" ? at::kFloat : at::kBFloat16;
  set_devices(arguments[4]);
  at::manual_seed(7);
  if (optimizer_kind == "group") {
    train_group(folder, std::stoi(arguments[5]), arguments[6] != nullptr);
    return 0;
  }
  nn::Sequential layers{nn::Linear(5, 9), nn::Tanh(), nn::Dropout(0.2), nn::Linear(9, 3)};
  layers->to(dtype);
  Model model(layers);
  model.run_options().microbatches = 3;
  const auto loss = [](const at::Tensor& outputs, const at::Tensor& label) {
    return (outputs - label).to(at::kFloat).square().sum();
  };
  const auto call = [&] {
    const at::Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
    return model.forward_backward(batch.to(dtype), labels, loss).loss.item<double>();
  };
  const int steps = std::stoi(arguments[5]);
  const std::string mode = arguments[6] == nullptr ? "" : arguments[6];
  const bool resumes = mode == "resume";
  int64_t step = 0;
  if (optimizer_kind == "fused") {
    Optimizer optimizer(model, torch::optim::AdamWOptions(0.02).weight_decay(0.01));
    optimizer.set_learning_rate([](int64_t done) { return 1 / (1 + 0.25 * static_cast<double>(done)); });
    if (mode == "try") {
      try_each(model, optimizer, call);
      return 0;
    }
    if (resumes) {
      const Loaded loaded = load_checkpoint(folder, model, optimizer);
      std::printf("%s %ld\n", loaded.value("note").as_string().c_str(),
                  loaded.value("array").as_tensor().sum().item<int64_t>());
    }
    for (int i = 0; i < steps; ++i) {
      std::printf("%a\n", call());
      model.step(optimizer);
    }
    save_checkpoint(folder, model, optimizer,
                    {.state = {{"note", "from C++"}, {"array", at::arange(4)}}, .wait = true});
    return 0;
  }
  const bool has_copies = optimizer_kind == "copies";
  std::vector<at::Tensor> parameters = layers->parameters();
  if (has_copies) {
    parameters.clear();
    for (const auto& [name, copy] : model.optimizer_parameters(at::kFloat)) parameters.push_back(copy);
  }
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.02).momentum(0.9));
  if (mode == "try") {
    try_each(model, optimizer, call);
    return 0;
  }
  if (resumes) step = load_checkpoint(folder, model, optimizer).step;
  for (int i = 0; i < steps; ++i) {
    std::printf("%a\n", call());
    if (has_copies) {
      model.step([&] {
        optimizer.step();
        optimizer.zero_grad();
      });
    } else {
      model.step(optimizer);
    }
    ++step;
  }
  save_checkpoint(folder, model, optimizer, {.step = step, .wait = true});
  return 0;
}
