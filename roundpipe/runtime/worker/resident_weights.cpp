#include <roundpipe/runtime/worker/resident_weights.h>

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/runtime/worker/host_fingerprint.h>

namespace roundpipe::runtime {

using device::EventPtr;
using transfer::Piece;
using transfer::Priority;

namespace {

// Submissions for which a copy stays that none of them wants. With devices in turn, a layer comes back after as many
// steps as there are devices.
constexpr uint64_t kStay = 32;

// Whether it is known what the call's layers do, so that a lack of memory costs another run of a microbatch at most.
bool is_known(const Call& call) {
  const bool has_run = std::ranges::all_of(call.habits, [](const auto& habits) { return habits->jobs.load() > 0; });
  return has_run || call.model->work_bytes.load() > 0;
}

// Whether a microbatch can run again, as JobRunner does when memory is short.
bool runs_again(const Call& call) {
  return std::ranges::none_of(call.habits, [&](const auto& habits) {
    const bool changes_buffers = habits->writes_buffers.load() == Learned::kYes && !call.requires_grad;
    return changes_buffers || habits->gradients_in_parts.load();
  });
}

int64_t size_in_slot(const ModelState& model, size_t block) {
  return align_up(model.blocks[block].block->layout().size_bytes, kBlockAlignment_bytes);
}

}  // namespace

std::vector<FrozenBlock> ResidentWeights::frozen_blocks(const JobRun& run) const {
  std::vector<FrozenBlock> found;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    for (const size_t block : run.layer(l).blocks) {
      const int64_t bytes = size_in_slot(*run.call->model, block);
      if (bytes > 0 && !run.call->trains(block)) found.push_back({block, bytes});
    }
  }
  return found;
}

void ResidentWeights::forget_expired() {
  std::erase_if(copies_, [](const auto& copy) { return copy.expired(); });
}

void ResidentWeights::choose(const Reserve& reserve) {
  std::vector<JobRun*> runs;
  for (const auto& run : queue_.jobs()) {
    if (std::exchange(run->may_reside, false)) runs.push_back(run.get());
  }
  if (runs.empty() || device_.memory_limit_bytes() == 0) return;
  Call& call = *runs.front()->call;
  ModelState& model = *call.model;
  const bool known = is_known(call);
  std::vector<WeightVisit> visits;
  ResidentRoom room{device_.memory_limit_bytes(), 0, -1};
  for (size_t i = 0; i < runs.size(); ++i) {
    visits.push_back({runs[i]->layout.size_bytes, known ? frozen_blocks(*runs[i]) : std::vector<FrozenBlock>{}});
    room.work_bytes = std::max(room.work_bytes, reserve(*runs[i], runs[(i + runs.size() - 1) % runs.size()]));
  }

  std::vector<at::Tensor> freed;  // after the lock
  std::set<uint64_t> chosen;
  {
    const MutexLock lock(mutex_);
    forget_expired();
    ++submissions_;
    std::vector<FrozenBlock> wanted, here, others, old;
    std::set<uint64_t> seen;
    std::set<const ResidentCopy*> mine;
    for (const WeightVisit& visit : visits) {
      for (const FrozenBlock& block : visit.frozen) {
        if (!seen.insert(block.key).second) continue;
        const ResidentCopyPtr copy = model.residents.find(worker_, block.key);
        const bool is_here = copy && copy->is_counted;
        if (copy) mine.insert(copy.get());
        (is_here ? here : wanted).push_back(block);
      }
    }
    std::vector<ResidentCopyPtr> unwanted;  // by key, behind those of the model's blocks
    for (const auto& weak : copies_) {
      const ResidentCopyPtr copy = weak.lock();
      if (!copy || mine.contains(copy.get())) continue;
      const bool stays = submissions_ - copy->last_wanted <= kStay;
      (stays ? others : old).push_back({model.blocks.size() + unwanted.size(), copy->size_bytes});
      unwanted.push_back(copy);
    }
    std::vector<FrozenBlock> candidates;
    for (const auto* some : {&here, &others, &wanted, &old})
      candidates.insert(candidates.end(), some->begin(), some->end());
    if (!runs_again(call)) candidates.clear();
    room.most_bytes = most_bytes_;
    chosen = choose_residents(visits, candidates, room);

    for (size_t i = 0; i < unwanted.size(); ++i) {
      if (!chosen.contains(model.blocks.size() + i)) take_off(*unwanted[i], freed);
    }
    for (const FrozenBlock& block : here) {
      if (!chosen.contains(block.key)) take_off(*model.residents.find(worker_, block.key), freed);
    }
    for (const uint64_t block : seen) {
      if (chosen.contains(block)) find(model, block)->last_wanted = submissions_;
    }
  }

  for (size_t i = 0; i < runs.size(); ++i) {
    std::set<size_t> apart;
    for (const FrozenBlock& block : visits[i].frozen) {
      if (!chosen.contains(block.key) || !apart.insert(block.key).second) continue;
      const auto at = runs[i]->residents.try_emplace(block.key, host_fingerprint(call, block.key)).first;
      model.blocks[block.key].block->add_reader(call.readings[block.key], at->second.read);
    }
    if (apart.empty()) continue;
    const schedule::Range layers = runs[i]->job.layers;
    runs[i]->whole_layout = std::exchange(runs[i]->layout, lay_out_stage(model, layers.first, layers.last, apart));
  }
}

int64_t ResidentWeights::size_bytes() const {
  const MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const auto& weak : copies_) {
    if (const ResidentCopyPtr copy = weak.lock()) bytes += copy->size_bytes;
  }
  return bytes;
}

ResidentCopyPtr ResidentWeights::find(ModelState& model, size_t block) {
  ResidentCopyPtr copy = model.residents.find(worker_, block);
  if (!copy) copy = replace(model, block);
  count(copy);
  return copy;
}

void ResidentWeights::count(const ResidentCopyPtr& copy) {
  if (!std::exchange(copy->is_counted, true)) copies_.push_back(copy);
}

ResidentCopyPtr ResidentWeights::replace(ModelState& model, size_t block) {
  auto copy = std::make_shared<ResidentCopy>(size_in_slot(model, block));
  copy->last_wanted = submissions_;
  count(copy);
  model.residents.put(worker_, block, copy);
  return copy;
}

void ResidentWeights::upload(const std::shared_ptr<JobRun>& run) {
  for (auto& [block, resident] : run->residents) {
    {
      const MutexLock lock(mutex_);
      resident.copy = find(*run->call->model, block);
    }
    submit(run, block, resident);
  }
}

void ResidentWeights::submit(const std::shared_ptr<JobRun>& run, size_t block, ResidentBlock& resident) {
  const auto& attempt = run->attempt;
  resident.arrived = attempt->new_event();
  const EventPtr settled = run->new_transfer(), filled = device::make_event();
  EventPtr before;
  {
    const MutexLock lock(mutex_);
    // What is under way for an earlier job may be what this one needs.
    before = std::exchange(resident.copy->filled, filled);
  }
  settled->then([filled] { filled->fire(); }, [filled](const std::exception_ptr&) { filled->fire(); });
  upload_.submit({Priority::kWeight,
                  {resident.fingerprint->known, attempt->follow(run->call->readings[block]->published), before},
                  [this, run, block, &resident] {
                    queue_.admit(*run, resident.arrived, device_.name());
                    std::vector<Piece> pieces;
                    run->attempt->read([&] { pieces = fill(*run, block, resident); });
                    return pieces;
                  },
                  resident.arrived,
                  settled});
}

std::vector<Piece> ResidentWeights::fill(JobRun& run, size_t block, ResidentBlock& resident) {
  const std::optional<uint64_t>& wanted = resident.fingerprint->value;
  at::Tensor memory;
  {
    const MutexLock lock(mutex_);
    ResidentCopy& copy = *resident.copy;
    const bool is_right = copy.bytes.defined() && copy.is_whole && !copy.is_doubtful && wanted && copy.holds == wanted;
    if (is_right) {
      ++copy.users;
      resident.weights = copy.bytes;
      return {};
    }
    // An earlier job reads what is there.
    if (copy.users > 0) resident.copy = replace(*run.call->model, block);
    memory = resident.copy->bytes;
  }
  // It may stand aside for lack of memory, so nothing has changed before this.
  if (!memory.defined()) {
    memory =
        at::empty({resident.copy->size_bytes}, at::TensorOptions().dtype(at::kByte).device(device_.torch_device()));
  }
  {
    const MutexLock lock(mutex_);
    ResidentCopy& copy = *resident.copy;
    copy.bytes = memory;
    copy.holds = wanted;
    copy.is_whole = copy.is_doubtful = false;
    ++copy.users;
    count(resident.copy);  // it may have been taken off since the job got its slot
    resident.weights = memory;
  }
  resident.arrived->then(
      [this, arrived = resident.arrived, copy = resident.copy] {
        if (arrived->error()) return;
        const MutexLock lock(mutex_);
        copy->is_whole = true;
      },
      [](const std::exception_ptr&) {});
  std::vector<Piece> pieces;
  const memory::WeightVersion& version = *run.call->readings[block];
  if (version.flat.defined()) pieces.push_back({memory.narrow(0, 0, version.flat.numel()), version.flat});
  const memory::BlockLayout& layout = run.call->model->blocks[block].block->layout();
  for (size_t p = 0; p < version.parts.size(); ++p) pieces.push_back({layout.view(memory, p), version.parts[p]});
  return pieces;
}

bool ResidentWeights::renew(const std::shared_ptr<JobRun>& run) {
  bool found = false;
  for (auto& [block, resident] : run->residents) {
    {
      const MutexLock lock(mutex_);
      if (!resident.copy->is_doubtful) continue;
      --resident.copy->users;
      resident.weights.reset();
      // Not the same again, for which the next job's transfer may be waiting.
      resident.copy = replace(*run->call->model, block);
    }
    submit(run, block, resident);
    found = true;
  }
  return found;
}

void ResidentWeights::doubt(const JobRun& run) {
  const MutexLock lock(mutex_);
  for (const auto& [block, resident] : run.residents) {
    if (resident.weights.defined()) resident.copy->is_doubtful = true;
  }
}

void ResidentWeights::release(JobRun& run) {
  {
    const MutexLock lock(mutex_);
    for (auto& [block, resident] : run.residents) {
      if (resident.weights.defined()) --resident.copy->users;
    }
  }
  run.residents.clear();
}

void ResidentWeights::take_off(ResidentCopy& copy, std::vector<at::Tensor>& freed) {
  if (copy.users > 0) return;
  if (copy.bytes.defined()) freed.push_back(std::exchange(copy.bytes, {}));
  copy.is_whole = false;
  copy.is_counted = false;
  std::erase_if(copies_, [&](const auto& weak) { return weak.lock().get() == &copy; });
}

std::vector<at::Tensor> ResidentWeights::free_idle() {
  forget_expired();
  std::vector<at::Tensor> freed;
  for (const auto& weak : std::vector(copies_)) {
    const ResidentCopyPtr copy = weak.lock();
    if (copy && copy->bytes.defined()) take_off(*copy, freed);
  }
  return freed;
}

bool ResidentWeights::give_way() {
  std::vector<at::Tensor> freed;
  const MutexLock lock(mutex_);
  int64_t held_bytes = 0;
  for (const auto& weak : copies_) {
    const ResidentCopyPtr copy = weak.lock();
    if (copy && copy->bytes.defined()) held_bytes += copy->size_bytes;
  }
  freed = free_idle();
  if (freed.empty()) return false;
  most_bytes_ = held_bytes / 2;
  return true;
}

bool ResidentWeights::park(const std::shared_ptr<JobRun>& run) {
  bool found = false;
  for (auto& [block, resident] : run->residents) {
    at::Tensor freed;  // after the lock
    {
      const MutexLock lock(mutex_);
      if (!resident.weights.defined() || resident.copy->users > 1 || resident.arrived->error()) continue;
      resident.weights.reset();
      resident.copy->users = 0;
      resident.copy->is_whole = false;
      freed = std::exchange(resident.copy->bytes, {});
    }
    submit(run, block, resident);
    found = true;
  }
  return found;
}

void ResidentWeights::drop_idle() {
  std::vector<at::Tensor> freed;
  const MutexLock lock(mutex_);
  freed = free_idle();
}

}  // namespace roundpipe::runtime
