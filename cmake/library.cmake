# The engine as one shared library, libroundpipe, from the objects of all levels. The Python extension and C++ programs
# link this one, so a process has one engine. Tests link the levels themselves.
include(GNUInstallDirs)
get_property(levels GLOBAL PROPERTY ROUNDPIPE_LEVELS)
set(objects "")
foreach(level IN LISTS levels)
  list(APPEND objects $<TARGET_OBJECTS:${level}>)
endforeach()
add_library(roundpipe SHARED ${objects})
add_library(RoundPipe::roundpipe ALIAS roundpipe)
set_target_properties(roundpipe PROPERTIES LINKER_LANGUAGE CXX)
target_compile_features(roundpipe INTERFACE cxx_std_20)
# Another project's warnings are not about our headers.
set(as_system "")
if(NOT PROJECT_IS_TOP_LEVEL)
  set(as_system SYSTEM)
endif()
target_include_directories(roundpipe ${as_system} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(roundpipe PUBLIC $<BUILD_INTERFACE:roundpipe::torch> $<INSTALL_INTERFACE:RoundPipe::torch>
                      Threads::Threads INTERFACE $<BUILD_INTERFACE:roundpipe_all_of_torch>)
roundpipe_warnings(roundpipe)
# Calls within the library are direct, as in a program that has the levels themselves.
set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
target_link_options(roundpipe PRIVATE -Wl,--version-script=${exports} -Wl,-Bsymbolic-functions)
set_target_properties(roundpipe PROPERTIES LINK_DEPENDS ${exports})
# What a program was linked with is found again by a name that changes with the binary interface: until 1.0, with each
# minor version. A wheel holds no links, and goes to machines whose torch lies elsewhere.
set(interface_version ${PROJECT_VERSION_MAJOR})
set(compatible_packages SameMajorVersion)
if(interface_version EQUAL 0)
  set(interface_version 0.${PROJECT_VERSION_MINOR})
  set(compatible_packages SameMinorVersion)
endif()
if(NOT SKBUILD)
  set_target_properties(roundpipe PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${interface_version} INSTALL_RPATH ${TORCH_DIR}/lib)
endif()

# --- In the Python package: beside the extension, and torch is loaded before it ------------------------------------

install(TARGETS roundpipe LIBRARY DESTINATION roundpipe COMPONENT python EXCLUDE_FROM_ALL)

# --- For C++: headers, the library, and what find_package(RoundPipe) reads -----------------------------------------

if(NOT ROUNDPIPE_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/RoundPipe)

install(TARGETS roundpipe EXPORT RoundPipe LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(EXPORT RoundPipe NAMESPACE RoundPipe:: FILE RoundPipeTargets.cmake DESTINATION ${package_folder} COMPONENT cpp)

# The headers that roundpipe/roundpipe.h includes, and those that these include. When the library is installed, since
# what a header includes may have changed by then.
install(CODE "
  set(from \"${PROJECT_SOURCE_DIR}\")
  set(to \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}\")
  include(\"${PROJECT_SOURCE_DIR}/cmake/install_headers.cmake\")" COMPONENT cpp)

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/RoundPipeConfig.cmake.in ${PROJECT_BINARY_DIR}/RoundPipeConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/RoundPipeConfigVersion.cmake COMPATIBILITY ${compatible_packages})
install(FILES ${PROJECT_BINARY_DIR}/RoundPipeConfig.cmake ${PROJECT_BINARY_DIR}/RoundPipeConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/find_torch.cmake
        DESTINATION ${package_folder} COMPONENT cpp)
