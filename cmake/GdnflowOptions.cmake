# Options, language standard, warnings: what every target of the project compiles with.

option(BUILD_SHARED_LIBS "Build a shared library" OFF)
option(GDNFLOW_BUILD_APPS "Build the gdnflow-* programs" ${PROJECT_IS_TOP_LEVEL})
option(GDNFLOW_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(GDNFLOW_BUILD_FUZZERS "Build the fuzzers: clang with libFuzzer" OFF)
option(GDNFLOW_INSTALL "Make the install rules" ON)
option(GDNFLOW_OPENMP "Run host stages in parallel" ON)
option(GDNFLOW_DELAY_ROLES "For tests: delay the roles of kernels at random and poison what they give back" OFF)
option(GDNFLOW_WERROR "Treat warnings as errors" OFF)
option(GDNFLOW_PORTABLE "Link Boost and the runtimes of C++ and OpenMP statically, for programs that move" OFF)
set(GDNFLOW_SANITIZE "" CACHE STRING "Sanitizers for host code, e.g. 'address,undefined' or 'thread'")

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  find_program(GDNFLOW_CCACHE ccache)
  mark_as_advanced(GDNFLOW_CCACHE)
  if(GDNFLOW_CCACHE)
    foreach(language IN ITEMS CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${GDNFLOW_CCACHE})
      endif()
    endforeach()
  endif()
endif()

add_library(gdnflow_flags INTERFACE)
# A feature rather than CMAKE_CXX_STANDARD: that would ask for CUDA's C++20 as well, which CMake 3.25
# does not know (GdnflowCuda.cmake gives that flag by hand).
target_compile_features(gdnflow_flags INTERFACE cxx_std_20)
target_compile_options(gdnflow_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra;--Werror=cross-execution-space-call>)
# g++ 12 sees overlapping copies in assignments of literals to strings, where there are none.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(gdnflow_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# Parallel loops run over heads and sequences, so Eigen's products stay on one thread.
target_compile_definitions(gdnflow_flags INTERFACE EIGEN_DONT_PARALLELIZE)
if(GDNFLOW_DELAY_ROLES)
  target_compile_definitions(gdnflow_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:GDNFLOW_DELAY_ROLES=1>)
endif()
if(GDNFLOW_WERROR)
  target_compile_options(gdnflow_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(GDNFLOW_SANITIZE)
  target_compile_options(gdnflow_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${GDNFLOW_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>)
  target_link_options(gdnflow_flags INTERFACE -fsanitize=${GDNFLOW_SANITIZE})
endif()
if(GDNFLOW_BUILD_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "GDNFLOW_BUILD_FUZZERS: expected clang++, got ${CMAKE_CXX_COMPILER_ID}")
  endif()
  target_compile_options(gdnflow_flags INTERFACE
    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(gdnflow_flags INTERFACE -fsanitize=address,undefined)
endif()
if(GDNFLOW_PORTABLE)
  target_link_options(gdnflow_flags INTERFACE -static-libstdc++ -static-libgcc)
endif()
