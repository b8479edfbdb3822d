# roundpipe_level(FOLDER [USES_TORCH] [UNITY n] [WITH subfolder...] DEPENDS target...): one static library for one level,
# roundpipe/FOLDER, from every .cpp in it and in the subfolders named; see roundpipe_unity for UNITY. cmake/library.cmake
# puts the objects of all levels into the shared library.
function(roundpipe_level folder)
  cmake_parse_arguments(arg "USES_TORCH" "UNITY" "WITH;DEPENDS" ${ARGN})
  set(path ${PROJECT_SOURCE_DIR}/roundpipe/${folder})
  file(GLOB sources CONFIGURE_DEPENDS ${path}/*.cpp)
  foreach(subfolder IN LISTS arg_WITH)
    file(GLOB more CONFIGURE_DEPENDS ${path}/${subfolder}/*.cpp)
    list(APPEND sources ${more})
  endforeach()
  string(REPLACE "/" "_" name ${folder})
  set(target roundpipe_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} PUBLIC ${arg_DEPENDS} Threads::Threads)
    set_property(GLOBAL APPEND PROPERTY ROUNDPIPE_LEVELS ${target})
    roundpipe_warnings(${target})
    if(arg_USES_TORCH)
      roundpipe_precompiled_torch(${target})
    endif()
    if(arg_UNITY)
      roundpipe_unity(${target} ${arg_UNITY})
    endif()
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE ${arg_DEPENDS})
  endif()
  add_library(roundpipe::${name} ALIAS ${target})
endfunction()

# roundpipe_test(LEVEL [USES_TORCH] [UNITY n]): the executable LEVEL_test from every .cpp below tests/cpp/LEVEL; nothing
# where there is no test.
function(roundpipe_test level)
  cmake_parse_arguments(arg "USES_TORCH" "UNITY" "" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${level}/*.cpp)
  if(NOT sources)
    return()
  endif()
  set(target ${level}_test)
  add_executable(${target} ${sources})
  target_link_libraries(${target} PRIVATE roundpipe_doctest_main roundpipe::${level})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/${level})
  roundpipe_warnings(${target})
  target_compile_options(${target} PRIVATE -Wno-missing-field-initializers)  # tests set what they are about
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)  # what is tested is compiled in its library
  if(arg_USES_TORCH)
    roundpipe_precompiled_torch(${target})
    set_target_properties(${target} PROPERTIES BUILD_RPATH ${TORCH_DIR}/lib)
  endif()
  if(arg_UNITY)
    roundpipe_unity(${target} ${arg_UNITY})
  endif()
  add_test(NAME ${level} COMMAND ${target})
  # Searches of full effort take some seconds, and under a sanitizer up to twenty times as long.
  set_tests_properties(${level} PROPERTIES TIMEOUT $<IF:$<BOOL:${ROUNDPIPE_SANITIZER}>,1800,600>)
endfunction()

function(roundpipe_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter)
  if(ROUNDPIPE_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      # Known for false alarms in inlined standard library code.
      target_compile_options(${target} PRIVATE -Wno-error=stringop-overflow -Wno-error=restrict -Wno-error=array-bounds
                                               -Wno-error=maybe-uninitialized)
    endif()
  endif()
  if(ROUNDPIPE_SANITIZER)
    target_compile_options(${target} PUBLIC -fsanitize=${ROUNDPIPE_SANITIZER} -fno-omit-frame-pointer -g)
    target_link_options(${target} PUBLIC -fsanitize=${ROUNDPIPE_SANITIZER})
    if(ROUNDPIPE_SANITIZER STREQUAL thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      # torch's headers hold an atomic fence, which ThreadSanitizer does not model.
      target_compile_options(${target} PRIVATE -Wno-tsan)
    endif()
  endif()
endfunction()

# torch's headers cost more than our code: the lowest level that uses torch compiles them once, and every library, test
# and benchmark above it uses the result.
function(roundpipe_precompiled_torch target)
  # One precompiled header serves only sources that are compiled alike, so executables are compiled like libraries.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  if(target STREQUAL roundpipe_device)
    target_precompile_headers(${target} PRIVATE <ATen/ATen.h> <torch/csrc/autograd/custom_function.h>
                              <torch/csrc/autograd/engine.h> <memory> <mutex> <string> <vector>)
  else()
    target_precompile_headers(${target} REUSE_FROM roundpipe_device)
  endif()
endfunction()

# Compiles `batch` sources of a target as one: each batch reads the headers, and makes the templates in them, once.
function(roundpipe_unity target batch)
  if(ROUNDPIPE_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
  endif()
endfunction()
