#include <roundpipe/saving/snapshot.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/step/state_reader.h>

namespace roundpipe::saving {

using runtime::ModelOptimizer;

namespace {

// Those of a state on the disk are not in the piece.
const at::Tensor& values_of(const Snapshot::Piece& piece, const optim::BlockOptimizer& optimizer,
                            optim::BlockStates::Hold& states) {
  if (!piece.tensor.is_meta()) return piece.tensor;
  if (piece.part == Snapshot::Part::kRemainder) return optimizer.remainder(piece.parameter, states);
  return states[piece.parameter].tensors[piece.moment];
}

}  // namespace

// Stands at one block. Holds the snapshot weakly: one that is dropped is written by nobody.
class Snapshot::Reader final : public runtime::StateReader {
 public:
  Reader(std::weak_ptr<Snapshot> snapshot, Unit* previous, Unit* state)
      : snapshot_(std::move(snapshot)), previous_(previous), state_(state) {}

  void before_step() override {
    const auto snapshot = snapshot_.lock();
    if (snapshot && previous_ != nullptr) snapshot->hold(*previous_);
  }
  void before_update() noexcept override {
    if (const auto snapshot = snapshot_.lock()) snapshot->copy_or_wait(*state_);
  }

 private:
  const std::weak_ptr<Snapshot> snapshot_;
  Unit* const previous_;  // null: there is none
  Unit* const state_;
};

Snapshot::Snapshot(ModelOptimizer& optimizer, std::shared_ptr<SnapshotMemory> memory, std::shared_ptr<const void> owner,
                   bool with_weights)
    : memory_(std::move(memory)),
      owner_(std::move(owner)),
      with_weights_(with_weights),
      step_(optimizer.last_step()),
      last_norm_(optimizer.last_norm()) {
  for (size_t index = 0; index < optimizer.block_count(); ++index) {
    const ModelOptimizer::BlockContents contents = optimizer.contents(index);
    if (contents.optimizer->trains_any()) blocks_.push_back({index, contents});
  }
}

std::shared_ptr<Snapshot> Snapshot::of(ModelOptimizer& optimizer, std::shared_ptr<SnapshotMemory> memory,
                                       std::shared_ptr<const void> owner, bool with_weights) {
  optimizer.take_writes();
  const std::shared_ptr<Snapshot> made(new Snapshot(optimizer, std::move(memory), std::move(owner), with_weights));
  std::vector<Unit*> previous(made->blocks_.size(), nullptr);
  for (size_t b = 0; b < made->blocks_.size(); ++b) {
    if (with_weights && made->blocks_[b].contents.read) {
      previous[b] = made->units_.emplace_back(std::make_unique<Unit>(b, true)).get();
    }
  }
  for (size_t b = 0; b < made->blocks_.size(); ++b) {
    Unit* const state = made->units_.emplace_back(std::make_unique<Unit>(b, false)).get();
    optimizer.set_reader(made->blocks_[b].index, std::make_shared<Reader>(made, previous[b], state));
  }
  return made;
}

Snapshot::~Snapshot() { cancel(); }

void Snapshot::freeze(Unit& unit) {
  if (std::exchange(unit.frozen, true)) return;
  const Block& block = blocks_[unit.block];
  const memory::ParameterBlock& parameters = *block.contents.state->block;
  const at::Tensor flat = unit.previous ? block.contents.read->flat : block.contents.newest->flat;
  for (size_t i = 0; with_weights_ && flat.defined() && i < parameters.parameters().size(); ++i) {
    unit.pieces.push_back(
        {unit.previous ? Part::kPrevious : Part::kWeights, block.index, i, 0, parameters.layout().view(flat, i)});
  }
  if (!unit.previous) freeze_state(unit);
}

void Snapshot::freeze_state(Unit& unit) {
  const Block& block = blocks_[unit.block];
  for (size_t i = 0; i < block.contents.state->block->parameters().size(); ++i) {
    if (block.contents.optimizer->group(i) < 0) continue;
    const at::Tensor& remainder = block.contents.optimizer->remainder(i);
    if (remainder.defined()) unit.pieces.push_back({Part::kRemainder, block.index, i, 0, remainder});
    const optim::ParameterState& state = block.contents.optimizer->states()[i];
    for (size_t m = 0; m < state.tensors.size(); ++m) {
      unit.pieces.push_back({Part::kMoment, block.index, i, m, state.tensors[m]});
    }
    if (!state.tensors.empty() || state.scalars.step > 0) unit.counters.push_back({block.index, i, state.scalars});
  }
  if (!block.contents.gradients) return;
  for (size_t i = 0; i < block.contents.state->block->parameters().size(); ++i) {
    const at::Tensor gradient = memory::gradient(*block.contents.gradients, block.contents.state->gradient_layout, i);
    if (gradient.defined()) unit.pieces.push_back({Part::kGradient, block.index, i, 0, gradient});
  }
}

void Snapshot::wait_ready() {
  if (step_) {
    step_->finished()->wait();
    if (const std::optional<double> norm = step_->norm_for_next()) last_norm_ = norm;
  }
  for (const Block& block : blocks_) {
    block.contents.newest->published->wait();
    if (block.contents.gradients) block.contents.gradients->landed->wait();
  }
  const MutexLock lock(mutex_);
  while (is_copying()) changed_.wait(mutex_);  // it changes the tensors that are listed here
  for (const auto& unit : units_) {
    freeze(*unit);
    unit->first = pieces_.size();
    pieces_.insert(pieces_.end(), unit->pieces.begin(), unit->pieces.end());
    counters_.insert(counters_.end(), unit->counters.begin(), unit->counters.end());
  }
  // Only their kinds are of use: holding the tensors would keep the memory of what is written.
  for (Piece& piece : pieces_) piece.tensor = at::empty_like(piece.tensor, piece.tensor.options().device(at::kMeta));
}

void Snapshot::hold(Unit& unit) {
  {
    const MutexLock lock(mutex_);
    if (unit.stage != Stage::kLive && unit.stage != Stage::kWriting) return;
    freeze(unit);
    int64_t bytes = 0;
    for (const Piece& piece : unit.pieces) bytes += static_cast<int64_t>(piece.tensor.nbytes());
    if (memory_->try_take(bytes)) {
      unit.held_bytes = bytes;
      if (unit.stage == Stage::kLive) unit.stage = Stage::kSafe;
      return;
    }
    unit.awaited = true;
  }
  const double began_ms = now_ms();
  device::wait_interruptible(*unit.over);
  memory_->note_wait(now_ms() - began_ms);
}

void Snapshot::copy_or_wait(Unit& unit) noexcept {
  const double began_ms = now_ms();
  bool copies = false;
  {
    const MutexLock lock(mutex_);
    if (unit.stage == Stage::kOver || unit.stage == Stage::kSafe) return;
    if (unit.stage == Stage::kLive) {
      int64_t bytes = 0;
      try {
        freeze(unit);
      } catch (...) {
        error_ = std::current_exception();
      }
      for (const Piece& piece : unit.pieces) bytes += static_cast<int64_t>(piece.tensor.nbytes());
      // While an update of the snapshot's own step is to come, this thread must not wait: it makes that update.
      const bool may_wait = !step_ || step_->finished()->complete();
      copies = memory_->try_take(bytes);
      if (!copies && !may_wait) {
        memory_->take(bytes);
        copies = true;
      }
      if (copies) {
        unit.stage = Stage::kCopying;
        unit.held_bytes = bytes;
      }
    }
    unit.awaited = !copies;
  }
  if (copies) return copy(unit);
  unit.over->wait_complete();
  memory_->note_wait(now_ms() - began_ms);
}

void Snapshot::copy(Unit& unit) noexcept {
  const at::NoGradGuard no_grad;
  std::exception_ptr error;
  try {
    optim::BlockOptimizer& optimizer = *blocks_[unit.block].contents.optimizer;
    optim::BlockStates::Hold states = optimizer.states().hold();
    for (Piece& piece : unit.pieces) piece.tensor = values_of(piece, optimizer, states).clone();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) give_up(error);
  const MutexLock lock(mutex_);
  if (error_) {
    finish(unit);
  } else {
    unit.stage = Stage::kSafe;
  }
  changed_.notify_all();
}

bool Snapshot::is_copying() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->stage == Stage::kCopying; });
}

Snapshot::Unit* Snapshot::next() {
  Unit* first = nullptr;
  for (const auto& unit : units_) {
    if (unit->stage != Stage::kLive && unit->stage != Stage::kSafe) continue;
    if (unit->awaited) return unit.get();
    if (first == nullptr) first = unit.get();
  }
  return first;
}

void Snapshot::finish(Unit& unit) {
  unit.stage = Stage::kOver;
  unit.pieces.clear();
  memory_->give_back(std::exchange(unit.held_bytes, 0));
  unit.over->fire();
}

void Snapshot::work(const Sink& sink) noexcept {
  const at::NoGradGuard no_grad;
  for (;;) {
    Unit* unit = nullptr;
    {
      const MutexLock lock(mutex_);
      for (;;) {
        unit = next();
        if (unit != nullptr || error_ || !is_copying()) break;
        changed_.wait(mutex_);
      }
      if (error_ || unit == nullptr) return;
      unit->stage = Stage::kWriting;
    }
    try {
      optim::BlockOptimizer& optimizer = *blocks_[unit->block].contents.optimizer;
      std::optional<optim::BlockStates::Hold> states;
      for (size_t i = 0; i < unit->pieces.size(); ++i) {
        const Piece& piece = unit->pieces[i];
        if (piece.tensor.is_meta() && !states) states.emplace(optimizer.states().hold());
        sink(unit->first + i, states ? values_of(piece, optimizer, *states) : piece.tensor);
        const MutexLock lock(mutex_);
        if (error_) break;
      }
    } catch (...) {
      give_up(std::current_exception());
    }
    const MutexLock lock(mutex_);
    finish(*unit);
  }
}

void Snapshot::write(const Sink& sink, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([this, &sink] { work(sink); });
  work(sink);
  for (std::thread& helper : helpers) helper.join();
  const MutexLock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void Snapshot::give_up(const std::exception_ptr& error) noexcept {
  const MutexLock lock(mutex_);
  if (!error_) error_ = error;
  for (const auto& unit : units_) {
    // Whoever writes or copies a unit ends it.
    if (unit->stage == Stage::kLive || unit->stage == Stage::kSafe) finish(*unit);
  }
  changed_.notify_all();
}

void Snapshot::cancel() {
  give_up(std::make_exception_ptr(Cancelled("[save_checkpoint] the save was cancelled; nothing of it remains")));
}

}  // namespace roundpipe::saving
