# Compiles through ccache where it is there when a build folder is first configured. The folder keeps to that: a launcher
# that comes or goes later would change every command, and compile everything again.
if(NOT DEFINED CACHE{ROUNDPIPE_CCACHE})
  find_program(found_ccache ccache NO_CACHE NO_CMAKE_SYSTEM_PATH)  # as a shell finds it
  set(ROUNDPIPE_CCACHE "${found_ccache}" CACHE STRING "ccache's path, or *-NOTFOUND; decided once for a build folder")
endif()
if(ROUNDPIPE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without these two, ccache does not cache what uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${ROUNDPIPE_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options(-fpch-preprocess)
  endif()
endif()
