#pragma once

#include <optional>
#include <vector>

#include <roundpipe/api/model.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/model_names.h>
#include <roundpipe/runs/trained_parts.h>

// What a Model and its optimizer are, for checkpoints.
namespace roundpipe {

TrainedModel parts_of(Model& model);
ModelNames names_of(const Model& model, const LeavesOut& leaves_out);

FusedOptimizer fused_of(const Optimizer& optimizer);
// Groups list their parameters in the model's order, as torch's optimizers do.
TrainedOptimizer parts_of(Optimizer& optimizer, const ModelNames& names);
// Throws std::invalid_argument, for `where`, for a class of libtorch's that checkpoints do not hold.
TrainedOptimizer parts_of(const torch::optim::Optimizer& optimizer, const char* where);

// The schedule of the learning rate, as torch's LambdaLR keeps it; nothing if there is none.
std::vector<GivenValue> schedules_of(const Optimizer& optimizer);

// Throws std::invalid_argument, for `where`, unless the optimizer steps the model and keeps all of its state here.
void require_whole_optimizer(const char* where, const Model& model, const Optimizer& optimizer);

}  // namespace roundpipe
