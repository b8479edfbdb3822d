#pragma once

// RoundPipe for C++ programs: everything that a program with libtorch needs to train a model that does not fit its
// devices. docs/cpp.md shows a whole program.
//
//   devices              set_devices("cuda:0,cuda:1"), devices(), restore_devices()
//   a model              Model, of a torch::nn::Sequential or of Layers: layer(module), layer(parameters, function)
//   a call               Model::forward, forward_backward, submit; RunOptions, Microbatches, TensorsOf
//   a step               Optimizer (fused), or torch::optim; StepOptions, Step; GradScaler; LearningRate
//   several models       ModelGroup, with what the program has on the host: one optimizer, one checkpoint
//   a language model     LanguageModel, of a folder of transformers; TokenFile, Rows and read_batch for its tokens
//   memory and plans     Model::predict_memory, last_plan, costs
//   checkpoints          save_checkpoint, load_checkpoint, load_weights, latest; StateValue; open_journal
//   errors               std::invalid_argument for a mistake of the caller's; Error, DeviceError for all else of ours
//   hooks                Frontend: interrupts, warnings. Nothing is installed in the process by itself.

#include <roundpipe/api/devices.h>
#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/api/learning_rate.h>
#include <roundpipe/api/model.h>
#include <roundpipe/api/model_group.h>
#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/language/language_model.h>
#include <roundpipe/language/token_batches.h>
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/optim/weight_decay.h>
#include <roundpipe/runs/load_checkpoint.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_checkpoint.h>
