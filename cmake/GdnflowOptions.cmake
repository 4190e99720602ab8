# Options, language standard, warnings, and the libraries that the sources use privately.

option(BUILD_SHARED_LIBS "Build a shared library" OFF)
option(GDNFLOW_BUILD_APPS "Build the gdnflow-* programs" ${PROJECT_IS_TOP_LEVEL})
option(GDNFLOW_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(GDNFLOW_OPENMP "Run host stages in parallel" ON)
option(GDNFLOW_WERROR "Treat warnings as errors" OFF)
set(GDNFLOW_SANITIZE "" CACHE STRING "Sanitizers for host code, e.g. 'address,undefined' or 'thread'")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
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
endif()

find_package(Eigen3 3.4 REQUIRED NO_MODULE)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
if(GDNFLOW_OPENMP)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
endif()

# What every target of the project compiles with.
add_library(gdnflow_flags INTERFACE)
target_compile_options(gdnflow_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra;--Werror=cross-execution-space-call>)
if(GDNFLOW_WERROR)
  target_compile_options(gdnflow_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(GDNFLOW_SANITIZE)
  target_compile_options(gdnflow_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${GDNFLOW_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>)
  target_link_options(gdnflow_flags INTERFACE -fsanitize=${GDNFLOW_SANITIZE})
endif()
