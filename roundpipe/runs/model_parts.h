#pragma once

#include <optional>
#include <vector>

#include <roundpipe/api/model_group.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/model_names.h>
#include <roundpipe/runs/trained_parts.h>
#include <roundpipe/training/fused_steps.h>

// What models and their optimizer are, for checkpoints.
namespace roundpipe {

// One model is the whole.
ModelGroup group_of(Model& model);

std::vector<TrainedModel> parts_of(const ModelGroup& group);
ModelNames names_of(const ModelGroup& group, const LeavesOut& leaves_out);
// All that hold parameters: of the models, and of the program's that a fused optimizer steps.
std::vector<std::shared_ptr<runtime::Pipeline>> pipelines_of(const ModelGroup& group);

FusedOptimizer fused_of(const Optimizer& optimizer);
// Groups list their parameters in the models' order, as torch's optimizers do.
TrainedOptimizer parts_of(Optimizer& optimizer, const ModelNames& names);
// Throws std::invalid_argument, for `where`, for a class of libtorch's that checkpoints do not hold.
TrainedOptimizer parts_of(const torch::optim::Optimizer& optimizer, const char* where);

// The schedule of the learning rate, as torch's LambdaLR keeps it; nothing if there is none.
std::vector<GivenValue> schedules_of(const Optimizer& optimizer);

FusedSteps::Models cores_of(const ModelGroup& group);
// Whether it steps these models and parameters, and nothing else.
bool steps_all_of(const FusedSteps& steps, const ModelGroup& group);
// Throws std::invalid_argument, for `where`, unless the optimizer steps the whole, nothing else, and keeps all of its
// state here.
void require_whole_optimizer(const char* where, const ModelGroup& group, const Optimizer& optimizer);

}  // namespace roundpipe
