# CLI11, headers only, by which our programs read their command lines. Without it they are not built.
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp)
if(NOT CLI11_INCLUDE_DIR)
  message(NOTICE "[build] CLI/CLI.hpp was not found, so roundpipe-train is not built; install it (Debian and Ubuntu: "
                 "libcli11-dev; macOS: cli11), or name its folder: -DCLI11_INCLUDE_DIR=...")
endif()
