# The torch of the Python that builds us, as the targets roundpipe::torch and roundpipe::torch_python.
#
# Not find_package(Torch): that one asks for a CUDA toolkit when torch was built with CUDA, and we use only torch's
# device-generic interfaces, so a user with a CUDA torch and no toolkit can build.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import os, torch; print(os.path.dirname(torch.__file__)); print(torch.__version__)"
  OUTPUT_VARIABLE torch_facts
  RESULT_VARIABLE torch_status
  ERROR_VARIABLE torch_error
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "[build] ${Python_EXECUTABLE} cannot import torch; install torch 2.11 or newer into this Python "
                      "and build with --no-build-isolation\n${torch_error}")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 TORCH_DIR)
list(GET torch_facts 1 TORCH_VERSION)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "[build] torch ${TORCH_VERSION} is too old; install torch 2.11 or newer")
endif()
message(STATUS "torch ${TORCH_VERSION} in ${TORCH_DIR}")

add_library(roundpipe_torch INTERFACE)
add_library(roundpipe::torch ALIAS roundpipe_torch)
target_include_directories(roundpipe_torch SYSTEM INTERFACE ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
target_link_directories(roundpipe_torch INTERFACE ${TORCH_DIR}/lib)
target_link_libraries(roundpipe_torch INTERFACE torch_cpu c10)

add_library(roundpipe_torch_python INTERFACE)
add_library(roundpipe::torch_python ALIAS roundpipe_torch_python)
target_link_libraries(roundpipe_torch_python INTERFACE roundpipe_torch torch_python)
target_include_directories(roundpipe_torch_python SYSTEM INTERFACE ${Python_INCLUDE_DIRS})
include(cmake/standard_library.cmake)
