# gdnflow_find_cuda_toolkit([REQUIRED]): find_package(CUDAToolkit 13.0). Also installed, for the package.
#
# CMake 3.25's own module trips over a toolkit without nvToolsExt, as 13.0 is, for projects that ask for
# CMake 3.25 or newer; so for the length of the call this one asks for less.
macro(gdnflow_find_cuda_toolkit)
  set(gdnflow_asked_for ${CMAKE_MINIMUM_REQUIRED_VERSION})
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit 13.0 ${ARGN})
  set(CMAKE_MINIMUM_REQUIRED_VERSION ${gdnflow_asked_for})
  unset(gdnflow_asked_for)
endmacro()
