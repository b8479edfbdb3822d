#pragma once

#include <map>
#include <memory>
#include <vector>

#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// Values of one microbatch on their way to, or on, a device. The link's until `uploaded` fires, then the worker's.
struct StagedValues {
  std::vector<memory::HostValuePtr> host;  // kept until the microbatch is through: it may be asked for once more
  bool filled = false;                     // whether `host` and `structure` are known
  std::vector<at::Tensor> device;          // aligned with host
  std::shared_ptr<const void> structure;
  device::EventPtr uploaded;
};

// Everything one microbatch of a job reads.
struct StagedMicrobatch {
  std::shared_ptr<StagedValues> inputs;
  std::shared_ptr<StagedValues> label;      // fused jobs
  std::shared_ptr<StagedValues> gradients;  // backward jobs; host and device entries may be null
};

// A job of a submitted call on its device: what was decided at submission, and how far it has come.
// Thread safety: made on the caller's thread, then belongs to its worker (under the worker's mutex until it runs).
struct JobRun {
  CallPtr call;
  schedule::Job job;
  double position = 0;  // in the order of the model's calls: Call::position + Job::order
  int last_layer = 0;   // of the model
  // Of a fused job. The call gives its own up once the caller has the losses, and a microbatch may still run anew.
  std::shared_ptr<Loss> loss;
  StageLayout layout;

  // Per layer of the stage; null where nothing is to be waited for or told.
  std::vector<device::EventPtr> buffers_before;
  std::vector<device::EventPtr> buffers_after;
  // Per layer of the stage: which part of RangeSum this job is, and of TiedSum which layer.
  std::vector<size_t> range_index;
  int first_backward_layer = 0;

  int slot = -1;
  at::Tensor weights;             // the slot, once uploaded
  device::EventPtr uploaded;      // all weights and buffers
  device::EventPtr weights_read;  // the host's weights are not read for this job any more
  at::Tensor parked;              // the weights on the host, while the running job needs their place on the device
  // Of transfers that have taken device memory before the job runs; under the worker's mutex.
  std::vector<device::EventPtr> begun;
  std::map<int, StagedMicrobatch> staged;
  // Transfer::settled of every transfer of this job: when all have fired, its slot is free and the job is over.
  std::vector<device::EventPtr> transfers;
  device::EventPtr new_transfer() { return transfers.emplace_back(device::make_event()); }
  // Those among them that lead to the host; the device's thread only.
  std::vector<device::EventPtr> outgoing;
  // Blocks until the device holds nothing any more that the job has sent; whether it had to wait.
  bool wait_sent() {
    bool waited = false;
    for (const device::EventPtr& sent : outgoing) {
      waited |= !sent->complete();
      sent->wait_complete();
    }
    outgoing.clear();
    return waited;
  }

  // A transfer that nobody in the pipeline waits for must not fail unnoticed.
  void fails_with(const device::EventPtr& done) const {
    call->then({done}, [] {});
  }

  LayerState& layer(int index) const { return *call->model->layers[static_cast<size_t>(index)]; }
  LayerHabits& habits(int index) const { return *call->habits[static_cast<size_t>(index)]; }
  size_t place(int index) const { return static_cast<size_t>(index - job.layers.first); }
};

}  // namespace roundpipe::runtime
