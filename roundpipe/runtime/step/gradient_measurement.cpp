#include <roundpipe/runtime/step/gradient_measurement.h>

#include <utility>

#include <ATen/core/grad_mode.h>

#include <roundpipe/optim/thread_pool.h>

namespace roundpipe::runtime {

GradientMeasurement::GradientMeasurement(uint64_t number, std::vector<Block> blocks, std::shared_ptr<void> owner)
    : number_(number), blocks_(std::move(blocks)), owner_(std::move(owner)), to_measure_(blocks_.size()) {}

void GradientMeasurement::start() {
  if (blocks_.empty()) return finished_->fire();
  const auto self = shared_from_this();
  for (Block& block : blocks_) {
    block.work = UpdateThread::prepare({number_, UpdateThread::Kind::kNorm, block.layer},
                                       [self, &block] { self->measure(block); });
  }
  for (Block& block : blocks_) {
    block.gradients->landed->then([self, &block] {
      if (block.gradients->share) block.gradients->share->is_used();
      self->hand_in(block);
    });
  }
}

void GradientMeasurement::hand_in(Block& block) noexcept {
  if (UpdateThread::instance().submit(block.work)) return;
  measure(block);
  block.work = {};
}

void GradientMeasurement::measure(Block& block) {
  const at::NoGradGuard no_grad;
  memory::GradientBlock& gradients = *block.gradients;
  try {
    if (const std::exception_ptr error = gradients.landed->error()) std::rethrow_exception(error);
    if (gradients.flat.defined()) {
      block.squares = block.optimizer->sums_of_squares(gradients, *block.layout, optim::GradientScaling().inverse_scale,
                                                       *optim::ThreadPool::current());
    }
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
  if (!gradients.landed->error()) gradients.flat.reset();
  if (gradients.share) gradients.share->give_back();
  block.gradients.reset();
  if (--to_measure_ > 0) return;
  norm_ = norm_of_squares(blocks_);
  owner_.reset();
  finished_->end(error_);
}

}  // namespace roundpipe::runtime
