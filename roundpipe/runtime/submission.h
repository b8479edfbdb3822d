#pragma once

#include <memory>
#include <vector>

#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/runtime/model_planner.h>

namespace roundpipe::runtime {

// Turns a call and its plan into jobs for the devices. Everything here runs on the caller's thread and never blocks.

// Returns the plan of the call. Backward stages end at the lowest layer that needs a backward, and given ones are cut
// into single layers if the call recomputes by layer, so that each is recomputed from its own inputs.
// Throws std::invalid_argument for stages or a plan that does not fit the model, the batch or the pool.
schedule::Plan plan_call(const Call& call, schedule::PlanMode mode, ModelPlanner& planner, Engine& engine);

// The request with what the model knows: its trained layers, and the lowest that needs a backward.
PlanRequest completed(const ModelState& model, PlanRequest request);

// Returns the plans that the next calls would have, one each, without making a call. Completes the
// request.
std::vector<schedule::Plan> preview_plans(const ModelState& model, const Route& route, PlanRequest request,
                                          const ModelPlanner& planner, Engine& engine, int steps);

// Makes the events of every boundary that the plan's jobs write or read, and notes which values the backward needs.
void open_boundaries(Call& call, const schedule::Plan& plan);

// Stores one microbatch's input at the first boundary: a copy if `copy` (the user may write to the input before its
// last read), else by reference where that is possible. REQUIRES: open_boundaries.
void put_inputs(Call& call, int microbatch, const Values& inputs, bool copy, bool pinned);

// Chains the call's gradients to those that the model has summed so far. Call it before jobs with a backward are
// submitted.
void open_gradients(Call& call, const schedule::Plan& plan);

// Host bytes of the partial sums of gradients that a backward of `plan` sends, beyond the gradients.
int64_t partial_sum_bytes(const ModelState& model, const schedule::Plan& plan, int gradient_groups,
                          TiedGradAccumulation tied);

// Gives the losses of the call's microbatches their turns, if its loss is open. Call it before jobs are submitted.
void open_loss_turns(Call& call, const schedule::Plan& plan);

// Submits the plan's jobs of the forward part (forward and fused), of the backward part, or of both.
void submit_jobs(const CallPtr& call, const schedule::Plan& plan, bool forward, bool backward, Engine& engine);

}  // namespace roundpipe::runtime
