# nlohmann's JSON for Modern C++, headers only, as the target roundpipe::json. Sources use it, our headers do not.
add_library(roundpipe_json INTERFACE)
add_library(roundpipe::json ALIAS roundpipe_json)
find_package(nlohmann_json 3.11 CONFIG QUIET)
if(nlohmann_json_FOUND)
  target_link_libraries(roundpipe_json INTERFACE nlohmann_json::nlohmann_json)
else()
  find_path(NLOHMANN_JSON_INCLUDE_DIR nlohmann/json.hpp)
  if(NOT NLOHMANN_JSON_INCLUDE_DIR)
    message(FATAL_ERROR "[build] nlohmann/json.hpp was not found; install it (Debian and Ubuntu: nlohmann-json3-dev; "
                        "macOS: nlohmann-json; conda: nlohmann_json), or name its folder: "
                        "-DNLOHMANN_JSON_INCLUDE_DIR=...")
  endif()
  target_include_directories(roundpipe_json SYSTEM INTERFACE ${NLOHMANN_JSON_INCLUDE_DIR})
endif()
