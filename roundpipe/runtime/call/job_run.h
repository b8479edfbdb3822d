#pragma once

#include <map>
#include <memory>
#include <vector>

#include <roundpipe/runtime/call/attempt.h>
#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/call/resident_block.h>
#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// Values of one microbatch on their way to a device, or on it. They belong to the link until `uploaded` fires, then to
// the worker.
struct StagedValues {
  std::vector<memory::HostValuePtr> host;  // kept until the microbatch is done: it may be uploaded again
  bool filled = false;                     // whether `host` and `structure` are known
  std::vector<at::Tensor> device;          // aligned with host
  std::shared_ptr<const void> structure;
  device::EventPtr uploaded;
};

// All values that one microbatch of a job reads.
struct StagedMicrobatch {
  std::shared_ptr<StagedValues> inputs;
  std::shared_ptr<StagedValues> label;      // fused jobs
  std::shared_ptr<StagedValues> gradients;  // backward jobs; host and device entries may be null
};

// A job of a submitted call on its device: the decisions made at submission, and its progress. In a fault tolerant
// call, a job whose device fails is run again on another one, as a JobRun of its own. What the job reads on the host
// and changes there stays until one of them is over.
//
// Thread safety: made on the caller's thread, then belongs to its worker (under the lock of the worker's queue until it
// runs).
struct JobRun final : public CheckedJob, public std::enable_shared_from_this<JobRun> {
  // Constant once the job is submitted.
  CallPtr call;
  schedule::Job job;
  std::shared_ptr<Attempt> attempt;
  double position = 0;  // in the order of the model's calls: Call::position + Job::order
  int last_layer = 0;   // of the model
  StageLayout layout;   // of its slot; once ResidentWeights has chosen, without its resident blocks
  // Per layer of the stage: events to wait for, and events to fire; null if there is none.
  std::vector<device::EventPtr> buffers_before;
  std::vector<device::EventPtr> buffers_after;
  device::EventPtr weights_read;  // fires when the job no longer reads the host's weights
  // Of a fused job that may be run again; else null, and the call has them.
  std::shared_ptr<const std::vector<Values>> labels;

  // Protected by the lock of the worker's queue.
  uint64_t era = 0;         // jobs of a later era come later on every device, whatever their positions
  uint64_t number = 0;      // among all jobs that the pool was given; orders those of one position
  int slot = -1;            // constant once it is set
  bool may_reside = false;  // it is to be decided which of its blocks are resident
  std::map<size_t, ResidentBlock> residents;  // by block; constant from then on, but for their contents
  StageLayout whole_layout;                   // if there are any: of all blocks, for another attempt
  std::vector<device::EventPtr> begun;        // transfers that have taken device memory before the job runs

  // Protected by that lock until the job runs, then the device's thread's.
  device::EventPtr uploaded;  // all weights and buffers
  // Per layer of the stage: its weights and buffers. Complete with `uploaded` at the latest.
  std::vector<device::EventPtr> layers_uploaded;
  std::map<int, StagedMicrobatch> staged;
  // Transfer::settled of every transfer of this job. Once all of them and its compute are complete, its slot is
  // released and the job is over.
  std::vector<device::EventPtr> transfers;
  device::EventPtr new_transfer() { return transfers.emplace_back(device::make_event()); }

  // The link's thread's until the first of these events fires, then the device's thread's.
  at::Tensor weights;  // the slot, once its upload has begun
  at::Tensor parked;   // the weights on the host, while they are evicted for the running job

  // The device's thread only.
  // Of a fused job, until it is over. The call drops its own reference once the caller has the losses, while a
  // microbatch may still run again.
  std::shared_ptr<Loss> loss;
  std::vector<device::EventPtr> outgoing;  // those of the transfers that go to the host
  // Blocks until the device holds nothing that the job has sent. Returns whether it had to wait.
  bool wait_sent() {
    bool waited = false;
    for (const device::EventPtr& sent : outgoing) {
      waited |= !sent->complete();
      sent->wait_complete();
    }
    outgoing.clear();
    return waited;
  }

  // New values of buffers, on the host, to be written there when the job is over.
  struct NewBuffers {
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> values;
    void write() const;
  };
  std::vector<NewBuffers> new_buffers;

  // Of a run that checks the job: the values of buffers that it reads, where others have written to them since, and
  // those before its own forwards, as in Call::snapshot. [layer], [layer, microbatch]
  std::map<int, std::vector<at::Tensor>> old_buffers;
  std::map<std::pair<int, int>, Call::BufferSnapshot> own_snapshots;  // the device's thread only

  // Makes a failure of `done` fail the attempt, for transfers that nothing in the pipeline waits for.
  void fails_with(const device::EventPtr& done) const {
    attempt->then({done}, [] {});
  }

  // Whether what the job reads stays on the host until it is over.
  bool keeps() const { return call->options.fault_tolerant || attempt->check(); }

  // Ends the job with this attempt: hands on its buffers and lets go of what it has read, once it is decided if the job
  // is checked. Call it once all transfers are complete. Returns false if another attempt has ended the job or will.
  // With true, the job counts as over.
  bool finish();
  void hand_on_buffers(bool keep_old) override;
  void conclude() override;
  // Ends the job without its results, after its call has failed. Returns false if it was over.
  bool give_up();
  // Another attempt at the same job; null if the job is over. The results of this one are dropped from now on.
  std::shared_ptr<JobRun> again() const;
  // Another run of the job, for `check`.
  std::shared_ptr<JobRun> to_check(const JobCheckPtr& check) const;

  LayerState& layer(int index) const { return *call->model->layers[static_cast<size_t>(index)]; }
  LayerHabits& habits(int index) const { return *call->habits[static_cast<size_t>(index)]; }
  size_t place(int index) const { return static_cast<size_t>(index - job.layers.first); }

 private:
  std::shared_ptr<JobRun> with(std::shared_ptr<Attempt> other) const;
  void let_go();
};

}  // namespace roundpipe::runtime
