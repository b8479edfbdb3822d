#include <roundpipe/runtime/model_optimizer.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <utility>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/step/gradient_measurement.h>

namespace roundpipe::runtime {

using optim::Hyperparameters;
using Reads = memory::ParameterBlock::Reads;

namespace {

std::optional<cluster::BlockShards> shards_of(const BlockState& state, const std::vector<int>& groups,
                                              const cluster::Nodes* nodes) {
  if (nodes == nullptr) return std::nullopt;
  std::vector<char> trained;
  for (const int group : groups) trained.push_back(group >= 0);
  return cluster::shard_block(state.block->layout(), state.gradient_layout, trained, nodes->size());
}

optim::Remainders& remainders_of(BlockState& state) {
  if (!state.remainders) state.remainders = std::make_shared<optim::Remainders>();
  return *state.remainders;
}

// Of a step or a measurement, each later than those before.
uint64_t next_number() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

// Gradients of a call that failed with this error.
memory::GradientBlockPtr failed_gradients(const std::exception_ptr& error) {
  auto gradients = std::make_shared<memory::GradientBlock>();
  gradients->landed->fail(error);
  return gradients;
}

memory::GradientBlockPtr no_gradients() {
  auto gradients = std::make_shared<memory::GradientBlock>();
  gradients->landed->fire();
  return gradients;
}

}  // namespace

ModelOptimizer::BoundBlock::BoundBlock(std::shared_ptr<ModelState> of, size_t block, size_t number,
                                       size_t layers_before, std::vector<int> groups, optim::Algorithm algorithm,
                                       optim::StateFormat format, const cluster::Nodes* nodes)
    : model(std::move(of)),
      state(model->blocks[block]),
      index(block),
      layer(layers_before + static_cast<size_t>(state.layers.front())),
      emulated_ms(model->layers[static_cast<size_t>(state.layers.front())]->layer->emulated_update_ms()),
      shards(shards_of(state, groups, nodes)),
      optimizer(*state.block, std::move(groups), remainders_of(state), algorithm, format,
                shards ? shards->elements[static_cast<size_t>(nodes->rank())] : std::vector<optim::ElementRange>(),
                number) {
  see();
}

std::vector<size_t> ModelOptimizer::BoundBlock::written() const {
  std::vector<size_t> indices;
  const auto& parameters = state.block->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (static_cast<uint32_t>(parameters[i].tensor._version()) != seen[i]) indices.push_back(i);
  }
  return indices;
}

void ModelOptimizer::BoundBlock::refuse_lost_writes() {
  for (const size_t i : written()) {
    if (state.block->newest_has(i)) continue;
    see();
    throw std::invalid_argument(concat("[step] parameter '", state.block->parameters()[i].name,
                                       "' was written while a step was under way, whose weights replace it; call "
                                       "model.synchronize() before you write, and write again"));
  }
}

void ModelOptimizer::BoundBlock::restart_masters(const std::vector<size_t>& written) {
  for (const size_t i : written) {
    optimizer.note_written(i);
    seen[i] = static_cast<uint32_t>(state.block->parameters()[i].tensor._version());
  }
  optimizer.restart_masters(state.block->newest()->flat);
}

void ModelOptimizer::BoundBlock::see() {
  seen.clear();
  for (const memory::NamedTensor& parameter : state.block->parameters()) {
    seen.push_back(static_cast<uint32_t>(parameter.tensor._version()));
  }
}

ModelOptimizer::ModelOptimizer(std::vector<std::shared_ptr<Pipeline>> pipelines,
                               const std::vector<std::vector<std::vector<int>>>& groups, optim::Algorithm algorithm,
                               optim::StateFormat format, std::shared_ptr<cluster::Nodes> nodes)
    : pipelines_(std::move(pipelines)), nodes_(std::move(nodes)), blocks_(std::make_shared<Blocks>()) {
  // Reads the settings in the environment now: an error on the update thread would come too late.
  optim::ThreadPool::current();
  instruction_set();
  size_t layers_before = 0;
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    const std::shared_ptr<ModelState> model = pipelines_[p]->shared_model();
    for (size_t b = 0; b < groups[p].size(); ++b) {
      model->blocks[b].block->own_trainable();
      const auto& parameters = model->blocks[b].block->parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        places_[parameters[i].tensor.unsafeGetTensorImpl()] = {blocks_->size(), i};
      blocks_->push_back(std::make_unique<BoundBlock>(model, b, blocks_->size(), layers_before, groups[p][b], algorithm,
                                                      format, nodes_.get()));
    }
    layers_before += model->layers.size();
  }
}

void ModelOptimizer::place_state(const DiskOptions& disk, const std::vector<Hyperparameters>& groups) {
  if (disk.is_on()) {
    std::vector<int64_t> bytes;
    for (const auto& block : *blocks_) bytes.push_back(block->optimizer.stored_bytes(groups, disk.holds));
    division_ = storage::divide(bytes, disk.memory_bytes, disk.held());
    for (size_t b = 0; b < bytes.size(); ++b) bytes[b] = division_.in_memory[b] ? 0 : bytes[b];
    if (division_.disk_bytes > 0) {
      files::FileSystem& files = disk.files != nullptr ? *disk.files : files::FileSystem::of_disk_tier();
      disk_ = std::make_shared<storage::DiskTier>(disk.folder, bytes, division_.window_bytes, files);
    }
    for (size_t b = 0; disk_ && b < bytes.size(); ++b) {
      if (bytes[b] > 0) (*blocks_)[b]->optimizer.keep_on(disk_, b, disk.holds);
    }
  }
  for (const auto& block : *blocks_) {
    block->optimizer.prepare_masters();
    if (disk_) disk_->raise();
  }
  if (!disk_) return;
  disk_->settle();
  disk_->raise();
}

void ModelOptimizer::take_masters() {
  for (const auto& block : *blocks_) block->optimizer.take_masters();
}

void ModelOptimizer::give_up_masters() {
  for (const auto& block : *blocks_) {
    if (!block->reader) continue;
    block->reader->before_step();
    std::exchange(block->reader, nullptr)->before_update();
  }
}

void ModelOptimizer::raise_disk() {
  if (!disk_) return;
  try {
    disk_->raise();
  } catch (const Error& error) {
    throw Error(concat(error.what(),
                       ". What could not be written is still in memory, so that a checkpoint can be saved; the next "
                       "step tries to write it again"));
  }
}

void ModelOptimizer::restart_masters(size_t block, const std::vector<size_t>& parameters) {
  BoundBlock& own = *blocks_->at(block);
  for (const size_t i : parameters) own.optimizer.note_written(i);
  own.optimizer.restart_masters([&](size_t i) { return own.state.block->parameters()[i].tensor.detach(); });
}

void ModelOptimizer::accept_weights() {
  measured_.reset();
  for (const auto& block : *blocks_) {
    block->see();
    block->optimizer.forget_written();
  }
}

void ModelOptimizer::reap(size_t at_most) {
  while (runs_.size() > at_most || (!runs_.empty() && runs_.front()->finished()->complete())) {
    const std::shared_ptr<StepRun> run = runs_.front();
    if (!run->finished()->complete()) {
      // The step's own error is thrown below; an interrupt leaves everything as it is, also if the step ends just then.
      try {
        device::wait_interruptible(*run->finished());
      } catch (...) {
        if (!run->finished()->complete() || !run->finished()->error()) throw;
      }
    }
    runs_.pop_front();
    if (const std::exception_ptr error = run->finished()->error()) std::rethrow_exception(error);
    if (const std::optional<double> norm = run->norm_for_next()) last_norm_ = norm;
  }
}

void ModelOptimizer::make_room() {
  constexpr size_t kUnderWay = 2;
  reap(kUnderWay - 1);
}

std::shared_ptr<StepRun> ModelOptimizer::step(std::vector<Hyperparameters> groups, const StepOptions& options,
                                              double loss_scale) {
  check(options, nodes_ != nullptr);
  check_at_once(options, loss_scale);
  require_engine();
  require_callers_thread();
  if (options.clip_by == ClipBy::kMeasuredNorm) require_measured_batch();
  // At once, the last step's weights have been read by now, so it has finished, or is about to.
  at_once() ? reap(0) : make_room();
  adopt_replaced();
  for (const auto& block : *blocks_) block->refuse_lost_writes();
  std::exception_ptr failure;
  try {
    raise_disk();
    for (const auto& pipeline : pipelines_) pipeline->raise_pending();
  } catch (...) {
    if (!nodes_) throw;
    failure = std::current_exception();
  }
  for (const auto& block : *blocks_) {
    if (block->reader) block->reader->before_step();
  }
  groups_ = groups;
  std::shared_ptr<StepRun> run = run_step(std::move(groups), options, loss_scale, failure);
  if (failure) std::rethrow_exception(failure);
  return run;
}

bool ModelOptimizer::has_gradients() const {
  return std::ranges::any_of(pipelines_, [](const auto& pipeline) { return pipeline->gradients().any(); });
}

bool ModelOptimizer::at_once() const {
  return std::ranges::any_of(pipelines_,
                             [](const auto& pipeline) { return pipeline->model().gradient_room != nullptr; });
}

void ModelOptimizer::check_at_once(const StepOptions& options, double loss_scale) const {
  if (!at_once()) return require_own_norm(options);
  const auto refuse = [](const char* what, const std::string& instead) {
    throw std::invalid_argument(concat("[step] ", what,
                                       " needs all gradients of a step at the same time, and those of "
                                       "this optimizer are used at once, expected ",
                                       instead, "; or make the optimizer without that option"));
  };
  if (options.asynchronous) refuse("a step beside the next call", "a synchronous one (is_async=False)");
  if (options.max_grad_norm && std::isfinite(*options.max_grad_norm) && options.clip_by == ClipBy::kNorm) {
    refuse("max_grad_norm",
           concat("clipping by the last step's norm (", frontend().option("clip_by", "last_norm"),
                  "), by one that measure_gradients has found in a first pass (",
                  frontend().option("clip_by", "measured_norm"), "), or none, or inf, which only measures it"));
  }
  if (loss_scale > 0) refuse("a scaler", "weights that need none, in bf16 or fp32");
  if (options.clip_by != ClipBy::kMeasuredNorm) return;
  if (nodes_) refuse_two_passes("step");
  const auto refuse_pass = [](const char* what, const char* expected) {
    throw std::invalid_argument(concat("[step] ", frontend().option("clip_by", "measured_norm"), " is given, and ",
                                       what, ", expected ", expected, " before this step"));
  };
  if (!measured_)
    refuse_pass("no norm has been measured since the last step",
                "measure_gradients, and the same batch's forward_backward again,");
  if (!has_gradients())
    refuse_pass("the measured gradients have been dropped", "the same batch's forward_backward again");
}

std::vector<CallPtr> ModelOptimizer::calls_of_gradients() const {
  std::vector<CallPtr> calls;
  for (const auto& pipeline : pipelines_) calls.push_back(pipeline->call_of_gradients());
  return calls;
}

std::vector<ModelOptimizer::Losses> ModelOptimizer::losses_of(const std::vector<CallPtr>& calls) {
  std::vector<Losses> losses;
  for (const CallPtr& call : calls) losses.push_back(call ? call->losses : Losses());
  return losses;
}

void ModelOptimizer::require_measured_batch() const {
  for (const auto& pipeline : pipelines_) pipeline->wait_losses();
  const bool same = std::ranges::equal(
      losses_of(calls_of_gradients()), measured_->losses,
      [](const Losses& again, const Losses& first) { return std::ranges::equal(again, first, are_same_losses); });
  if (same) return;
  throw std::invalid_argument(
      "[step] the losses of this batch are others than those of the measured one, expected the same batch, in the same "
      "microbatches; measure this one, too, or clip by the last step's norm");
}

double ModelOptimizer::measure_gradients() {
  if (!at_once()) {
    throw std::invalid_argument(
        "[measure_gradients] gradients of this optimizer wait for its steps, expected one that uses them at once; "
        "here, max_grad_norm clips by the same norm in one pass");
  }
  if (nodes_) refuse_two_passes("measure_gradients");
  require_engine();
  require_callers_thread();
  reap(0);
  for (const auto& pipeline : pipelines_) pipeline->raise_pending();
  if (!has_gradients()) {
    throw std::invalid_argument(
        "[measure_gradients] there are no gradients, expected a forward_backward since the last step or measurement");
  }
  const std::vector<CallPtr> calls = calls_of_gradients();
  std::map<const ModelState*, std::vector<memory::GradientBlockPtr>> gradients;
  for (const auto& pipeline : pipelines_) gradients[&pipeline->model()] = pipeline->take_gradients();
  std::vector<GradientMeasurement::Block> measured;
  for (const auto& block : *blocks_) {
    const memory::GradientBlockPtr& gradient = gradients.at(block->model.get())[block->index];
    if (!block->optimizer.trains_any() || !gradient) continue;
    measured.push_back({&block->optimizer, &block->state.gradient_layout, block->layer, gradient, {}, {}});
  }
  const auto measurement = std::make_shared<GradientMeasurement>(next_number(), std::move(measured), blocks_);
  measurement->start();
  for (const auto& pipeline : pipelines_) pipeline->drain();
  device::wait_interruptible(*measurement->finished());
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    if (calls[p]) pipelines_[p]->undo(*calls[p]);
  }
  measured_ = {measurement->norm(), losses_of(calls)};
  return measured_->norm;
}

std::shared_ptr<StepRun> ModelOptimizer::run_step(std::vector<Hyperparameters> groups, const StepOptions& options,
                                                  double loss_scale, const std::exception_ptr& failure) {
  std::map<const ModelState*, std::vector<memory::GradientBlockPtr>> gradients;
  for (const auto& pipeline : pipelines_) {
    auto& taken = gradients[&pipeline->model()];
    if (failure) {
      taken.assign(pipeline->model().blocks.size(), failed_gradients(failure));
      continue;
    }
    taken = pipeline->take_gradients();
    pipeline->commit_calls();
    for (memory::GradientBlockPtr& each : taken) {
      if (nodes_ && !each) each = no_gradients();
    }
  }
  std::vector<BlockStep> steps;
  steps.reserve(blocks_->size());
  for (const auto& block : *blocks_) {
    BlockState& state = block->state;
    if (!block->optimizer.trains_any()) continue;
    const std::vector<size_t> written = block->written();
    block->see();
    const memory::GradientBlockPtr& gradient = gradients[block->model.get()][block->index];
    if (!gradient) {
      if (!written.empty() && block->reader) std::exchange(block->reader, nullptr)->before_update();
      try {
        if (!written.empty()) block->restart_masters(written);
      } catch (const storage::Unreadable&) {
        // They still have to be, and the next one who needs them tells.
      }
      if (state.block->settle()) state.block->repoint();
      continue;
    }
    const memory::ParameterBlock::Update versions =
        state.block->begin_update(options.asynchronous ? Reads::kBefore : Reads::kAfter);
    state.block->repoint();
    BlockStep& step = steps.emplace_back();
    step.model = block->model.get();
    step.block = &state;
    step.optimizer = &block->optimizer;
    step.layer = block->layer;
    step.gradients = gradient;
    step.before = versions.before;
    step.after = versions.after;
    step.written = written;
    if (nodes_) {
      step.shards = &*block->shards;
      step.number = static_cast<size_t>(&block - blocks_->data());
    }
    step.emulated_ms = block->emulated_ms;
    step.reader = std::exchange(block->reader, nullptr);
    if (std::exchange(block->stepped, true)) step.meter = &block->model->updates;
  }
  std::optional<double> given_norm;
  if (options.clip_by == ClipBy::kLastNorm) given_norm = last_norm_;
  if (options.clip_by == ClipBy::kMeasuredNorm) given_norm = measured_->norm;
  measured_.reset();
  const auto run = std::make_shared<StepRun>(next_number(), std::move(steps), std::move(groups), options, loss_scale,
                                             blocks_, nodes_, ++turn_, at_once(), given_norm);
  runs_.push_back(run);
  run->start();
  return run;
}

ModelOptimizer::BlockContents ModelOptimizer::contents(size_t index) const {
  const BoundBlock& block = *blocks_->at(index);
  const memory::ParameterBlock& parameters = *block.state.block;
  BlockContents contents;
  contents.state = &block.state;
  contents.optimizer = &blocks_->at(index)->optimizer;
  contents.newest = parameters.newest();
  if (contents.newest != parameters.current()) contents.read = parameters.current();
  for (const auto& pipeline : pipelines_) {
    const bool shown = pipeline->gradients().shown();
    if (&pipeline->model() == block.model.get() && !shown) contents.gradients = block.model->gradients[block.index];
  }
  return contents;
}

void ModelOptimizer::set_reader(size_t index, std::shared_ptr<StateReader> reader) {
  blocks_->at(index)->reader = std::move(reader);
}

std::vector<at::Tensor> ModelOptimizer::load_next_weights(size_t index) {
  BoundBlock& block = *blocks_->at(index);
  memory::ParameterBlock& parameters = *block.state.block;
  const memory::ParameterBlock::Update update = parameters.begin_update(Reads::kBefore);
  update.after->flat = parameters.buffers()->take();
  update.after->published->fire();
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < parameters.parameters().size(); ++i) {
    views.push_back(parameters.layout().view(update.after->flat, i));
  }
  return views;
}

void ModelOptimizer::adopt_replaced() {
  for (const auto& pipeline : pipelines_) pipeline->weights().adopt_replaced();
}

void ModelOptimizer::take_writes() {
  for (const auto& pipeline : pipelines_) pipeline->gradients().gather();
  adopt_replaced();
  restart_masters();
}

void ModelOptimizer::restart_masters() {
  for (const auto& block : *blocks_) {
    if (!block->optimizer.trains_any()) continue;
    std::vector<size_t> written = block->written();
    // The next step refuses those.
    std::erase_if(written, [&](size_t i) { return !block->state.block->newest_has(i); });
    if (!written.empty() && block->reader) std::exchange(block->reader, nullptr)->before_update();
    if (!written.empty() || runs_.empty()) block->restart_masters(written);
  }
}

void ModelOptimizer::finish() {
  require_own_process();
  reap(0);
  adopt_replaced();  // values that the user has assigned after the step are newer than its weights
  for (const auto& block : *blocks_) {
    if (block->reader) block->reader->before_step();
    if (block->state.block->settle()) block->state.block->repoint();
  }
  restart_masters();
  raise_disk();
}

void ModelOptimizer::drop_gradients() {
  for (const auto& pipeline : pipelines_) pipeline->gradients().drop();
}

ModelOptimizer::HostBytes ModelOptimizer::host_bytes(const std::vector<Hyperparameters>& groups) const {
  require_own_process();
  HostBytes bytes;
  for (const auto& pipeline : pipelines_) bytes.weights_and_gradients += pipeline->model().host_bytes();
  for (const auto& block : *blocks_) {
    const auto& parameters = block->state.block->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (block->optimizer.group(i) >= 0) bytes.parameters += parameters[i].tensor.numel();
    }
    const bool has_tier = block->optimizer.states().tier() != nullptr;
    (has_tier ? bytes.moments_on_disk : bytes.moments) += block->optimizer.moment_bytes(groups);
    const bool has_masters_there = block->state.remainders->on_disk != nullptr;
    (has_masters_there ? bytes.remainders_on_disk : bytes.remainders) += block->optimizer.remainder_bytes();
  }
  const int64_t on_disk = bytes.moments_on_disk + bytes.remainders_on_disk;
  const int64_t moments = division_.in_window(bytes.moments_on_disk, on_disk);
  const int64_t remainders = division_.in_window(bytes.remainders_on_disk, on_disk);
  bytes.moments += moments;
  bytes.moments_on_disk -= moments;
  bytes.remainders += remainders;
  bytes.remainders_on_disk -= remainders;
  return bytes;
}

}  // namespace roundpipe::runtime
