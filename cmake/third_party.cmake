# Headers of other projects, as targets: always our copies, so that every machine builds the same. Sources use them, our
# headers do not.
foreach(name json cli11 doctest)
  add_library(roundpipe_${name} INTERFACE)
  add_library(roundpipe::${name} ALIAS roundpipe_${name})
  target_include_directories(roundpipe_${name} SYSTEM INTERFACE ${PROJECT_SOURCE_DIR}/third_party/${name})
endforeach()
