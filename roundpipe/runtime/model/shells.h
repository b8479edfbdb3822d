#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime {

// The place for the gradients of one layer's parameters while a backward job runs.
struct GradientSink {
  // Per parameter of the layer: its part of the job's flat sums, or undefined (frozen, no backward, or a tied parameter
  // that is summed on the host).
  std::vector<at::Tensor> targets;
  std::vector<char> received;
  // Per parameter: the gradient, in this microbatch, of a tied parameter that is summed on the host.
  std::vector<at::Tensor> tied;

  // Throws Error for a closed parameter.
  void consume(size_t parameter, at::Tensor gradient);
  // Likewise, for a product of 16-bit matrices, and for a gradient in fp32, neither of which is rounded to the
  // parameter's dtype. Return false, and do nothing, where the parameter has no fp32 sum here.
  bool add_product(size_t parameter, const at::Tensor& left, const at::Tensor& right);
  bool add_wide(size_t parameter, const at::Tensor& gradient);
  void reset(size_t parameters);
  // The backward has passed the layer: gradients that arrive from now on, in this microbatch, come late.
  void pass() { passed_ = true; }
  // The sum of this parameter leaves, so no further gradient of it may arrive; one that arrives once more because the
  // microbatch runs again is ignored.
  void close(size_t parameter);

  // Gradients that arrive from now on belong to a new microbatch.
  void begin_microbatch();
  // The microbatch ran out of memory and runs again: gradients that have arrived are ignored the second time.
  // REQUIRES: can_retry().
  void retry();
  // Returns false if a parameter's gradient arrived in several parts.
  bool can_retry() const { return !in_parts_; }
  // In this microbatch: whether the backward has passed the layer, and whether a gradient has come after that.
  bool is_passed() const { return passed_; }
  bool came_late() const { return came_late_; }

 private:
  bool sums_wide(size_t parameter) const;
  // Notes that a gradient has come. Returns false for one that is to be ignored.
  bool arrives(size_t parameter);
  void note(size_t parameter);  // that it has been added

  std::vector<int> taken_;  // per parameter: how many that an earlier run of this microbatch added are still to come
  std::vector<int> came_;   // per parameter: how many have been added in this microbatch
  std::vector<char> closed_;
  bool passed_ = false;
  bool came_late_ = false;
  bool in_parts_ = false;  // a parameter's gradient has arrived in several parts
};

// A layer's instance on a device, with its sink.
struct Shell {
  std::unique_ptr<LayerShell> layer;
  GradientSink sink;
  bool refreshed = false;
  std::shared_ptr<const void> attributes;  // the latest argument of refresh()
};

// A model's shells on every worker, each made when first needed.
// Thread safety: get() from the worker's thread; keep() when no job of the model is left on the other workers.
class Shells {
 public:
  // Returns the shell of layer number `index` for worker number `worker`, whose tensors are on `device`. `attributes`:
  // the result of Layer::attributes() for the current call.
  Shell& get(int worker, size_t index, Layer& layer, c10::Device device, const std::shared_ptr<const void>& attributes);
  // Drops the shells on all workers but these.
  void keep(const std::vector<int>& workers);

 private:
  Mutex mutex_;
  std::map<std::pair<int, size_t>, std::unique_ptr<Shell>> shells_ ROUNDPIPE_GUARDED_BY(mutex_);  // [worker, layer]
};

}  // namespace roundpipe::runtime
