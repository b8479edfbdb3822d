# roundpipe_torch links the C++ standard library that torch has loaded, where the compiler would link an archive.
#
# A compiler outside its usual folders may find only libstdc++.a. An extension with its own copy beside torch's shares
# some of that copy's tables and not others: the first number that it prints ends the process.
set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/standard_library)
file(WRITE ${probe}.cpp "#include <iostream>\nint main() { std::cout << 1; }\n")
try_compile(probe_compiles ${probe} ${probe}.cpp COPY_FILE ${probe}.bin OUTPUT_VARIABLE compiler_says)
if(NOT probe_compiles)
  message(FATAL_ERROR "[build] ${CMAKE_CXX_COMPILER} cannot compile and link a C++ program of one line, expected a "
                      "compiler with its standard library; choose another: CXX=/usr/bin/g++. It says:\n${compiler_says}")
endif()
file(STRINGS ${probe}.bin shared_library REGEX "libstdc[+][+][.]so|libc[+][+][.]so" LIMIT_COUNT 1)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT shared_library)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import torch; print(next(line.split()[-1] for line in open('/proc/self/maps') if 'libstdc++.so' in line))"
    OUTPUT_VARIABLE torch_standard_library
    RESULT_VARIABLE found
    ERROR_QUIET
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT found EQUAL 0)
    message(FATAL_ERROR "[build] ${CMAKE_CXX_COMPILER} links libstdc++.a, and torch's libstdc++.so was not found; "
                        "choose another compiler: CXX=/usr/bin/g++")
  endif()
  message(STATUS "${CMAKE_CXX_COMPILER} links libstdc++.a; linking torch's ${torch_standard_library} instead")
  target_link_libraries(roundpipe_torch INTERFACE ${torch_standard_library})
endif()
