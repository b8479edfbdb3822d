#include <roundpipe/layers/host_parameters.h>

#include <roundpipe/core/error.h>

namespace roundpipe::layers {

namespace {

class HostParameters final : public runtime::Layer {
 public:
  HostParameters(std::string name, std::vector<memory::NamedTensor> parameters)
      : name_(std::move(name)), parameters_(std::move(parameters)) {}

  std::string name() const override { return name_; }
  std::vector<memory::NamedTensor> parameters() const override { return parameters_; }
  std::vector<memory::NamedTensor> buffers() const override { return {}; }
  std::unique_ptr<runtime::LayerShell> make_shell(c10::Device) override {
    throw Error(concat("[", name_, "] parameters that are used on the host were sent to a device"));
  }

 private:
  const std::string name_;
  const std::vector<memory::NamedTensor> parameters_;
};

}  // namespace

std::unique_ptr<runtime::Layer> make_host_parameters(std::string name, std::vector<memory::NamedTensor> parameters) {
  return std::make_unique<HostParameters>(std::move(name), std::move(parameters));
}

}  // namespace roundpipe::layers
