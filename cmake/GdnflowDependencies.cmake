# The libraries that the sources use privately. All but Boost.Program_options and OpenMP are headers,
# so a machine that has the headers alone, without packages that CMake can find, will do.

function(gdnflow_header_library package target header)
  cmake_parse_arguments(PARSE_ARGV 3 arg "" "SUFFIX;DEFINITION" "")
  find_package(${package} QUIET CONFIG)
  if(TARGET ${target})
    return()
  endif()
  find_path(GDNFLOW_${package}_INCLUDE ${header} PATH_SUFFIXES ${arg_SUFFIX})
  mark_as_advanced(GDNFLOW_${package}_INCLUDE)
  if(NOT GDNFLOW_${package}_INCLUDE)
    message(FATAL_ERROR "gdnflow needs ${package}: expected the header ${header}, found none "
                        "(cmake/setup.sh installs it on Debian and Ubuntu)")
  endif()
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} INTERFACE ${GDNFLOW_${package}_INCLUDE})
  target_compile_definitions(${target} INTERFACE ${arg_DEFINITION})
endfunction()

gdnflow_header_library(Eigen3 Eigen3::Eigen Eigen/Core SUFFIX eigen3)
gdnflow_header_library(fmt fmt::fmt-header-only fmt/format.h DEFINITION FMT_HEADER_ONLY=1)
gdnflow_header_library(nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp)
if(GDNFLOW_BUILD_TESTS)
  gdnflow_header_library(doctest doctest::doctest doctest/doctest.h)
endif()

# The C interface takes DLPack's tensors; without that header it is left out.
find_path(GDNFLOW_dlpack_INCLUDE dlpack/dlpack.h)
mark_as_advanced(GDNFLOW_dlpack_INCLUDE)
if(GDNFLOW_dlpack_INCLUDE)
  add_library(gdnflow_dlpack INTERFACE)
  target_include_directories(gdnflow_dlpack SYSTEM INTERFACE ${GDNFLOW_dlpack_INCLUDE})
else()
  message(STATUS "gdnflow: no C interface, for want of the header dlpack/dlpack.h")
endif()

# What a program that links the static library links too; made visible to a project that adds this
# one as a subdirectory.
set(GDNFLOW_LINK_LIBRARIES "")

# fmt's headers alone, so that nothing need be there when a program runs. Under sanitizers its compiled
# library, where the package has one: there, its code takes ten seconds in each file that formats.
set(GDNFLOW_FMT fmt::fmt-header-only)
if((GDNFLOW_SANITIZE OR GDNFLOW_BUILD_FUZZERS) AND PROJECT_IS_TOP_LEVEL AND TARGET fmt::fmt)
  set(GDNFLOW_FMT fmt::fmt)
  list(APPEND GDNFLOW_LINK_LIBRARIES $<BUILD_INTERFACE:fmt::fmt>)
endif()
if(GDNFLOW_OPENMP)
  if(GDNFLOW_PORTABLE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT OpenMP_gomp_LIBRARY)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libgomp.a
      OUTPUT_VARIABLE gomp OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(OpenMP_gomp_LIBRARY ${gomp} CACHE FILEPATH "GCC's OpenMP runtime, linked statically")
  endif()
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
  list(APPEND GDNFLOW_LINK_LIBRARIES OpenMP::OpenMP_CXX)
endif()
