#include <roundpipe/runtime/call/job_check.h>

#include <algorithm>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>

namespace roundpipe::runtime {

JobCheck::JobCheck(CallPtr call, schedule::Job job, std::function<void()> dispute)
    : call_(std::move(call)), job_(job), dispute_(std::move(dispute)), hold_(call_->hold()) {}

int JobCheck::add_run() {
  const MutexLock lock(mutex_);
  runs_.emplace_back();
  return static_cast<int>(runs_.size()) - 1;
}

size_t JobCheck::place_of(const std::shared_ptr<device::Health>& device) {
  const auto found = std::ranges::find(devices_, device);
  if (found != devices_.end()) return static_cast<size_t>(found - devices_.begin());
  devices_.push_back(device);
  changes_copies_.push_back(0);
  return devices_.size() - 1;
}

void JobCheck::runs_on(int run, const std::shared_ptr<device::Health>& device) {
  const MutexLock lock(mutex_);
  Run& each = runs_[static_cast<size_t>(run)];
  each.seen.device = place_of(device);
  void_ |= std::exchange(each.begun, true);
}

void JobCheck::saw(int run, const JobResult& result, uint32_t checksum) {
  const MutexLock lock(mutex_);
  runs_[static_cast<size_t>(run)].seen.results[result] = checksum;
}

std::vector<std::shared_ptr<device::Health>> JobCheck::devices() const {
  const MutexLock lock(mutex_);
  return devices_;
}

void JobCheck::expect_copies(size_t devices) {
  const MutexLock lock(mutex_);
  copies_left_ += devices;
}

void JobCheck::copied(const std::shared_ptr<device::Health>& device, bool unchanged) {
  {
    const MutexLock lock(mutex_);
    if (!unchanged) changes_copies_[place_of(device)] = 1;
    --copies_left_;
    if (!all_over()) return;
  }
  decide();
}

bool JobCheck::all_over() const { return copies_left_ == 0 && std::ranges::all_of(runs_, &Run::over); }

void JobCheck::over(int run, std::shared_ptr<CheckedJob> job) {
  bool same = false, disputed = false, decided = false;
  std::shared_ptr<CheckedJob> first;
  {
    const MutexLock lock(mutex_);
    runs_[static_cast<size_t>(run)].over = true;
    if (run == 0) first_ = std::move(job);
    if (!all_over()) return;
    same = agree(seen());
    disputed = std::exchange(disputed_, !same);
    decided = void_;
    first = first_;
  }
  if (decided || call_->failed()) return conclude();
  if (same) {
    ++call_->model->verified_jobs;
    return conclude();
  }
  if (disputed) return decide();
  // The buffers that the job has written are others' now. More runs read copies of the old ones.
  first->hand_on_buffers(/*keep_old=*/true);
  dispute_();
}

std::vector<CheckedRun> JobCheck::seen() const {
  std::vector<CheckedRun> all;
  for (const Run& run : runs_) all.push_back(run.seen);
  return all;
}

Verdict JobCheck::verdict() const {
  std::vector<CheckedDevice> devices;
  for (size_t i = 0; i < devices_.size(); ++i) devices.push_back({devices_[i]->device(), changes_copies_[i] != 0});
  return judge(devices, seen());
}

void JobCheck::decide() {
  Verdict verdict;
  std::vector<std::shared_ptr<device::Health>> devices;
  {
    const MutexLock lock(mutex_);
    verdict = this->verdict();
    devices = devices_;
  }
  if (call_->failed()) return conclude();
  const std::string what =
      concat("the ", schedule::phase_name(job_.phase), " of layers ", job_.layers.first, " to ", job_.layers.last - 1,
             " of ", call_->model->name, " in call ", call_->index, " does not have the same bits on every device: ");
  if (verdict.wrong.empty()) {
    call_->fail(std::make_exception_ptr(Error(concat("[verify] ", what, verdict.reason))));
  }
  for (const size_t place : verdict.wrong) {
    const auto& device = devices[place];
    const std::exception_ptr error = std::make_exception_ptr(WrongBits(concat(
        "[", device->device(), "] the device failed: it computes or copies wrong bits; ", what, verdict.reason)));
    call_->fail(error);
    device->fail(error);
  }
  conclude();
}

void JobCheck::conclude() {
  std::shared_ptr<CheckedJob> first;
  std::shared_ptr<void> hold;
  {
    const MutexLock lock(mutex_);
    first = std::move(first_);
    hold = std::move(hold_);
  }
  if (first) first->conclude();
  // Only now may the call be over.
  hold.reset();
}

uint32_t checksum_of(const std::vector<at::Tensor>& tensors) {
  uint32_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    const int64_t bytes = tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : -1;
    sum = files::crc32c(&bytes, sizeof(bytes), sum);
    if (bytes <= 0) continue;
    const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().contiguous();
    sum = files::crc32c(dense.const_data_ptr(), static_cast<size_t>(bytes), sum);
  }
  return sum;
}

}  // namespace roundpipe::runtime
