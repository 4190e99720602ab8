# Finds nvcc, chooses architectures, and sets GDNFLOW_WITH_CUDA.

set(GDNFLOW_CUDA AUTO CACHE STRING "Build the GPU stages: AUTO (where nvcc is), ON or OFF")
set_property(CACHE GDNFLOW_CUDA PROPERTY STRINGS AUTO ON OFF)

set(GDNFLOW_WITH_CUDA OFF)
if(NOT GDNFLOW_CUDA STREQUAL "OFF")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # CMake 3.25 does not know C++20 for CUDA, so the flag is given by hand.
    string(APPEND CMAKE_CUDA_FLAGS " -std=c++20")
    find_package(CUDAToolkit 13.0 REQUIRED)
    set(GDNFLOW_WITH_CUDA ON)
  elseif(GDNFLOW_CUDA STREQUAL "ON")
    message(FATAL_ERROR "GDNFLOW_CUDA is ON: expected nvcc 13.0 or newer on PATH or in CMAKE_CUDA_COMPILER, found none")
  endif()
endif()
message(STATUS "gdnflow: CUDA ${GDNFLOW_WITH_CUDA}")
