# Headers of other projects, as targets: those of the machine, or else our copies. Sources use them, our headers do not.
#
# roundpipe_headers(NAME PACKAGE VERSION): roundpipe::NAME, from a package of at least that version or third_party/NAME
function(roundpipe_headers name package version)
  add_library(roundpipe_${name} INTERFACE)
  add_library(roundpipe::${name} ALIAS roundpipe_${name})
  find_package(${package} ${version} CONFIG QUIET)
  if(${package}_FOUND)
    target_link_libraries(roundpipe_${name} INTERFACE ${package}::${package})
  else()
    target_include_directories(roundpipe_${name} SYSTEM INTERFACE ${PROJECT_SOURCE_DIR}/third_party/${name})
  endif()
endfunction()

roundpipe_headers(json nlohmann_json 3.11)
roundpipe_headers(cli11 CLI11 2.1)
roundpipe_headers(doctest doctest 2.4)
