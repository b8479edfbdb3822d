#include "bindings.h"

#include <roundpipe/torch_compat/vector_math.h>

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ engine. Use the roundpipe package; this module is not a public interface.";
  // The user's own plain loop gets the same bits in every run, too.
  roundpipe::torch_compat::settle_vector_math();
  roundpipe::python::bind_errors(module);
  roundpipe::python::bind_frontend(module);
  roundpipe::python::bind_device(module);
  roundpipe::python::bind_memory(module);
  roundpipe::python::bind_modules(module);
  roundpipe::python::bind_microbatches(module);
  roundpipe::python::bind_schedule(module);
  roundpipe::python::bind_optim(module);
  roundpipe::python::bind_models(module);
  roundpipe::python::bind_pipeline(module);
  roundpipe::python::bind_model_core(module);
  roundpipe::python::bind_copy_steps(module);
  roundpipe::python::bind_quantise(module);
  roundpipe::python::bind_random(module);
  roundpipe::python::bind_nodes(module);
  roundpipe::python::bind_model_optimizer(module);
  roundpipe::python::bind_saving(module);
  roundpipe::python::bind_ops(module);
  roundpipe::python::bind_checkpoint_files(module);
  roundpipe::python::bind_run_folder(module);
  roundpipe::python::bind_stored_checkpoint(module);
  roundpipe::python::bind_step_records(module);
  roundpipe::python::bind_tokens(module);
  roundpipe::python::bind_training_load(module);
  roundpipe::python::bind_training_options(module);
}
