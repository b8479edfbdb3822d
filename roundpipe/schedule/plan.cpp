#include <roundpipe/schedule/plan.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace roundpipe::schedule {

namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("[validate] " + message); }

std::string cell(int layer, int microbatch) {
  return "layer " + std::to_string(layer) + ", microbatch " + std::to_string(microbatch);
}

bool inside(Range range, int size) { return 0 <= range.first && range.first < range.last && range.last <= size; }

bool belongs(Phase phase, PlanMode mode) {
  switch (phase) {
    case Phase::kForward:
      return true;
    case Phase::kFused:
      return mode == PlanMode::kFused;
    case Phase::kBackward:
      return mode != PlanMode::kInference;
  }
  return false;
}

std::vector<Range> distinct(const Plan& plan, bool forward) {
  std::vector<Range> stages;
  for (const Job& job : plan.jobs) {
    if ((job.phase == Phase::kForward) == forward && std::ranges::find(stages, job.layers) == stages.end())
      stages.push_back(job.layers);
  }
  return stages;
}

// Walks the jobs in dispatch order and records which job has computed each (layer, microbatch).
class Walk {
 public:
  Walk(const Plan& plan, PlanMode mode) : plan_(plan), mode_(mode), forward_(cells(), -1), backward_(cells(), -1) {}

  void run() {
    for (number_ = 0; number_ < static_cast<int>(plan_.jobs.size()); ++number_) {
      const Job& job = plan_.jobs[static_cast<std::size_t>(number_)];
      check_fields(job);
      if (!(job.order >= 0 && job.order < 2)) fail_job("has order " + std::to_string(job.order) + ", expected [0, 2)");
      if (number_ > 0 && job.order < plan_.jobs[static_cast<std::size_t>(number_) - 1].order)
        fail_job("has a smaller order than the job before it; sort the jobs by their order");
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) visit(job, m);
    }
    for (int layer = 0; layer < plan_.layers; ++layer) {
      for (int m = 0; m < plan_.microbatches; ++m) {
        if (at(forward_, layer, m) < 0) missing("forward", layer, m);
        if (needs_backward(layer) && at(backward_, layer, m) < 0) missing("backward", layer, m);
      }
    }
  }

 private:
  std::size_t cells() const {
    return static_cast<std::size_t>(plan_.layers) * static_cast<std::size_t>(plan_.microbatches);
  }

  int& at(std::vector<int>& table, int layer, int m) {
    return table[static_cast<std::size_t>(layer) * static_cast<std::size_t>(plan_.microbatches) +
                 static_cast<std::size_t>(m)];
  }

  bool needs_backward(int layer) const { return mode_ != PlanMode::kInference && layer >= plan_.first_backward_layer; }

  [[noreturn]] void fail_job(const std::string& what) const {
    fail("job " + std::to_string(number_) + " (" + to_string(plan_.jobs[static_cast<std::size_t>(number_)]) + ") " +
         what);
  }

  [[noreturn]] void missing(const char* phase, int layer, int m) const {
    fail("no job runs the " + std::string(phase) + " of " + cell(layer, m) + ", expected exactly one in mode " +
         mode_name(mode_) + "; add it to a job");
  }

  void check_fields(const Job& job) const {
    if (!belongs(job.phase, mode_))
      fail_job(std::string("has a phase that mode ") + mode_name(mode_) + " does not know; choose another mode");
    if (!inside(job.layers, plan_.layers))
      fail_job("has a bad layer range, expected a non-empty part of " + to_string(Range{0, plan_.layers}));
    if (!inside(job.microbatches, plan_.microbatches))
      fail_job("has a bad microbatch range, expected a non-empty part of " + to_string(Range{0, plan_.microbatches}));
    if (job.device < 0 || job.device >= plan_.devices)
      fail_job("has a bad device, expected one of " + to_string(Range{0, plan_.devices}));
    const bool at_end = job.layers.last == plan_.layers;
    if (job.phase == Phase::kFused && !at_end) fail_job("is fused but stops before the last layer; extend it");
    if (mode_ == PlanMode::kFused && job.phase != Phase::kFused && at_end)
      fail_job("holds the last layer, expected only fused jobs there in mode fused");
    if (job.phase == Phase::kBackward && job.layers.first < plan_.first_backward_layer)
      fail_job("goes below first_backward_layer " + std::to_string(plan_.first_backward_layer) + "; cut it there");
  }

  void visit(const Job& job, int m) {
    if (job.phase == Phase::kBackward) {
      for (int layer = job.layers.first; layer < job.layers.last; ++layer) require(forward_, "forward", layer, m);
      if (job.layers.last < plan_.layers) {
        require(backward_, "backward", job.layers.last, m);
      } else {
        for (int other = 0; other < plan_.microbatches; ++other) require(forward_, "forward", plan_.layers - 1, other);
      }
    } else if (job.layers.first > 0) {
      require(forward_, "forward", job.layers.first - 1, m);
    }
    for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
      if (job.phase != Phase::kBackward) claim(forward_, "forward", layer, m);
      if (job.phase != Phase::kForward && needs_backward(layer)) claim(backward_, "backward", layer, m);
    }
  }

  void require(std::vector<int>& table, const char* phase, int layer, int m) {
    if (at(table, layer, m) < 0)
      fail_job("stands before the " + std::string(phase) + " of " + cell(layer, m) +
               ", which it needs, expected a topological order; move it behind that job");
  }

  void claim(std::vector<int>& table, const char* phase, int layer, int m) {
    int& owner = at(table, layer, m);
    if (owner >= 0)
      fail_job("repeats the " + std::string(phase) + " of " + cell(layer, m) + " of job " + std::to_string(owner) +
               ", expected exactly one; cut one of them");
    owner = number_;
  }

  const Plan& plan_;
  const PlanMode mode_;
  std::vector<int> forward_, backward_;
  int number_ = 0;
};

}  // namespace

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kFused:
      return "fused";
    case Phase::kBackward:
      return "backward";
  }
  return "unknown";
}

const char* mode_name(PlanMode mode) {
  switch (mode) {
    case PlanMode::kInference:
      return "inference";
    case PlanMode::kTrain:
      return "train";
    case PlanMode::kFused:
      return "fused";
  }
  return "unknown";
}

std::string to_string(const Job& job) {
  return std::string(phase_name(job.phase)) + ", layers " + to_string(job.layers) + ", microbatches " +
         to_string(job.microbatches) + ", device " + std::to_string(job.device);
}

std::vector<Range> Plan::forward_stages() const { return distinct(*this, true); }

std::vector<Range> Plan::backward_stages() const { return distinct(*this, false); }

PlanMode mode_of(const Plan& plan) {
  const auto has = [&](Phase phase) { return std::ranges::find(plan.jobs, phase, &Job::phase) != plan.jobs.end(); };
  if (has(Phase::kFused)) return PlanMode::kFused;
  return has(Phase::kBackward) ? PlanMode::kTrain : PlanMode::kInference;
}

void validate(const Plan& plan, PlanMode mode) {
  const auto positive = [](const char* field, int value) {
    if (value < 1) fail("plan." + std::string(field) + " is " + std::to_string(value) + ", expected at least 1");
  };
  positive("layers", plan.layers);
  positive("microbatches", plan.microbatches);
  positive("devices", plan.devices);
  if (plan.first_backward_layer < 0 || plan.first_backward_layer > plan.layers)
    fail("plan.first_backward_layer is " + std::to_string(plan.first_backward_layer) + ", expected 0 to " +
         std::to_string(plan.layers));
  Walk(plan, mode).run();
}

Plan with_single_backward_layers(Plan plan) {
  std::vector<Job> jobs;
  for (const Job& job : plan.jobs) {
    if (job.phase != Phase::kBackward) {
      jobs.push_back(job);
      continue;
    }
    for (int layer = job.layers.last; layer-- > job.layers.first;) {
      jobs.push_back(job);
      jobs.back().layers = {layer, layer + 1};
    }
  }
  plan.jobs = std::move(jobs);
  return plan;
}

JobIndex::JobIndex(const Plan& plan) : microbatches_(plan.microbatches) {
  forward_.assign(at(plan.layers, 0), -1);
  backward_.assign(at(plan.layers, 0), -1);
  for (std::size_t j = 0; j < plan.jobs.size(); ++j) {
    const Job& job = plan.jobs[j];
    for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
        if (job.phase != Phase::kBackward) forward_[at(layer, m)] = static_cast<int>(j);
        if (job.phase != Phase::kForward && layer >= plan.first_backward_layer)
          backward_[at(layer, m)] = static_cast<int>(j);
      }
    }
  }
}

}  // namespace roundpipe::schedule
