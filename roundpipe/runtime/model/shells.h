#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime {

// Where the gradients of one layer's parameters go while a backward job runs.
struct GradientSink {
  // Per parameter of the layer: the place in the job's flat block, or undefined (tied, frozen, no backward).
  std::vector<at::Tensor> targets;
  std::vector<char> received;
  // Per parameter: what a tied one got in this microbatch.
  std::vector<at::Tensor> tied;

  void consume(size_t parameter, at::Tensor gradient);
  void reset(size_t parameters);

  // Gradients that come from now on are those of a new microbatch.
  void begin_microbatch();
  // The microbatch runs anew after it has run out of memory: what has come is not taken again.
  // REQUIRES: can_retry().
  void retry();
  // False when a parameter's gradient came in several parts.
  bool can_retry() const { return !in_parts_; }

 private:
  std::vector<char> taken_;  // per parameter: what is here already
  std::vector<char> came_;   // per parameter: has come since
  bool in_parts_ = false;    // a backward brought a parameter's gradient in several parts
};

// A layer's instance on a device, with its sink.
struct Shell {
  std::unique_ptr<LayerShell> layer;
  GradientSink sink;
  bool refreshed = false;
  std::shared_ptr<const void> attributes;  // what it was refreshed with last
};

// A model's shells on every worker, made when first needed.
// Thread safety: get() from the worker's thread; clear() when no job of the model is left.
class Shells {
 public:
  // Of layer number `index`, for worker number `worker`, whose tensors lie on `device`. `attributes`: what
  // Layer::attributes() returned for the call that runs now.
  Shell& get(int worker, size_t index, Layer& layer, c10::Device device, const std::shared_ptr<const void>& attributes);
  void clear();

 private:
  Mutex mutex_;
  std::map<std::pair<int, size_t>, std::unique_ptr<Shell>> shells_ ROUNDPIPE_GUARDED_BY(mutex_);  // [worker, layer]
};

}  // namespace roundpipe::runtime
