# Finds a torch by its files: nothing of torch's is run, and no Python is needed if a folder is named. The build and the
# installed package both use this.
#
# Not find_package(Torch): that one asks for a CUDA toolkit when torch was built with CUDA. The engine uses only torch's
# device-generic interfaces, so a CUDA torch without a toolkit is enough.

# roundpipe_find_torch(DEFAULT): sets TORCH_DIR, the folder with torch's include/ and lib/, TORCH_VERSION and
# TORCH_CXX11_ABI (0 or 1) in the caller, and TORCH_PROBLEM to what is wrong with them, or to nothing.
#
# The first of these that is given is used, and refused if it is no torch: ROUNDPIPE_TORCH_DIR; the torch of the Python
# ROUNDPIPE_PYTHON; Torch_DIR, which find_package(Torch) sets; a torch in CMAKE_PREFIX_PATH; the torch of
# Python_EXECUTABLE; the folder DEFAULT, which may be empty.
function(roundpipe_find_torch default)
  set(problem "")
  set(folder "")
  set(python "")
  set(in_prefix "")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    foreach(folder IN ITEMS ${prefix} ${prefix}/../..)
      if(NOT in_prefix AND EXISTS ${folder}/share/cmake/Torch/TorchConfig.cmake)
        set(in_prefix ${folder})
      endif()
    endforeach()
  endforeach()

  if(ROUNDPIPE_TORCH_DIR)
    set(folder ${ROUNDPIPE_TORCH_DIR})
    set(source "ROUNDPIPE_TORCH_DIR")
  elseif(ROUNDPIPE_PYTHON)
    set(python ${ROUNDPIPE_PYTHON})
  elseif(Torch_DIR)
    set(folder ${Torch_DIR}/../../..)
    set(source "Torch_DIR")
  elseif(in_prefix)
    set(folder ${in_prefix})
    set(source "CMAKE_PREFIX_PATH")
  elseif(Python_EXECUTABLE)
    set(python ${Python_EXECUTABLE})
  elseif(default AND EXISTS ${default})
    set(folder ${default})
    set(source "the torch that RoundPipe was built with")
  else()
    string(CONCAT problem "no torch was named; name its folder, the one with include/ and lib/: "
                          "-DROUNDPIPE_TORCH_DIR=..., or a Python that has torch: -DROUNDPIPE_PYTHON=...")
  endif()
  if(python)
    set(source ${python})
    execute_process(
      COMMAND ${python} -c "import importlib.util; print(*importlib.util.find_spec('torch').submodule_search_locations)"
      OUTPUT_VARIABLE folder RESULT_VARIABLE status ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT status EQUAL 0)
      string(CONCAT problem "${python} has no torch; install torch into this Python (and build with "
                            "--no-build-isolation), or name a libtorch folder: -DROUNDPIPE_TORCH_DIR=...")
    endif()
  endif()

  set(version "")
  set(abi "")
  if(NOT problem)
    get_filename_component(folder ${folder} REALPATH)
    foreach(header IN ITEMS headeronly/version.h csrc/api/include/torch/version.h)
      if(NOT version AND EXISTS ${folder}/include/torch/${header})
        file(STRINGS ${folder}/include/torch/${header} numbers REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
        string(REGEX REPLACE "[^0-9;]" "" numbers "${numbers}")
        string(REPLACE ";" "." version "${numbers}")
      endif()
    endforeach()
    set(c10 ${folder}/lib/libc10.so)
    if(NOT version OR NOT EXISTS ${c10} OR NOT EXISTS ${folder}/lib/libtorch_cpu.so)
      string(CONCAT problem "${source} is ${folder}, expected a folder of torch's, with include/torch and "
                            "lib/libtorch_cpu.so; unpack a libtorch archive, or name the folder torch/ of a Python's "
                            "packages")
    else()
      # An exception's constructor takes a string, and tells by its name which one.
      file(STRINGS ${c10} takes_new_string REGEX "^_ZN3c105ErrorC[12]E.*7__cxx1112basic_string" LIMIT_COUNT 1)
      set(abi 0)
      if(takes_new_string)
        set(abi 1)
      endif()
    endif()
  endif()
  if(NOT problem AND TARGET torch_cpu)
    # Two torches in one program do not work.
    get_target_property(theirs torch_cpu LOCATION)
    get_filename_component(theirs "${theirs}" REALPATH)
    get_filename_component(ours ${folder}/lib/libtorch_cpu.so REALPATH)
    if(NOT theirs STREQUAL ours)
      string(CONCAT problem "find_package(Torch) has found ${theirs}, and RoundPipe was to use ${ours}; set Torch_DIR "
                            "and ROUNDPIPE_TORCH_DIR to the same torch")
    endif()
  endif()
  set(TORCH_DIR "${folder}" PARENT_SCOPE)
  set(TORCH_VERSION "${version}" PARENT_SCOPE)
  set(TORCH_CXX11_ABI "${abi}" PARENT_SCOPE)
  set(TORCH_PROBLEM "${problem}" PARENT_SCOPE)
endfunction()

# Both take an INTERFACE library. What links it uses the torch that was found, whether or not the project has targets of
# find_package(Torch).

# roundpipe_use_torch(TARGET): torch's headers and its libraries.
function(roundpipe_use_torch target)
  target_include_directories(${target} SYSTEM INTERFACE
    ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
  target_link_libraries(${target} INTERFACE ${TORCH_DIR}/lib/libtorch_cpu.so ${TORCH_DIR}/lib/libc10.so)
  target_compile_definitions(${target} INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})
endfunction()

# roundpipe_load_torch(TARGET): programs load all of torch, from this folder, also if they call nothing of it themselves:
# libtorch.so brings the backends of accelerators.
function(roundpipe_load_torch target)
  set(libraries ${TORCH_DIR}/lib/libtorch.so ${TORCH_DIR}/lib/libtorch_cpu.so ${TORCH_DIR}/lib/libc10.so)
  string(REPLACE ";" "," libraries "${libraries}")
  target_link_options(${target} INTERFACE LINKER:--push-state,--no-as-needed,${libraries},--pop-state)
endfunction()
