# One way of using the library: see CMakeLists.txt for the variables. Fails at the first command that
# does.

function(run)
  # ARGN would break an argument that holds a list into several.
  cmake_parse_arguments(PARSE_ARGV 0 run "" "" "")
  list(JOIN run_UNPARSED_ARGUMENTS " " command)
  message(STATUS "${command}")
  execute_process(COMMAND ${run_UNPARSED_ARGUMENTS} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
string(REPLACE ";" "\\;" ARCHITECTURES "${ARCHITECTURES}")
# Whatever decides on flags is as in the build that tests, so that a compiler cache knows the objects.
set(common -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_CXX_COMPILER_LAUNCHER=${CXX_LAUNCHER} -DGDNFLOW_OPENMP=${OPENMP} -DGDNFLOW_WERROR=${WERROR})
set(consumer ${CMAKE_COMMAND} -S ${SOURCE}/tests/install/consumer -B ${WORK}/consumer ${common})
set(prefix ${WORK}/prefix)

if(MODE STREQUAL "installed")
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
  run(${consumer} -DUSE=package -DCMAKE_PREFIX_PATH=${prefix})
elseif(MODE STREQUAL "shared")
  set(cuda -DGDNFLOW_CUDA=OFF)
  if(CUDA)
    set(cuda -DGDNFLOW_CUDA=ON -DCMAKE_CUDA_COMPILER=${CUDA_COMPILER}
      "-DGDNFLOW_CUDA_ARCHITECTURES=${ARCHITECTURES}")
  endif()
  run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/library ${common} ${cuda} -DBUILD_SHARED_LIBS=ON
    -DGDNFLOW_BUILD_APPS=OFF -DGDNFLOW_BUILD_TESTS=OFF -DGDNFLOW_RESOURCE_REPORT=ON)
  run(${CMAKE_COMMAND} --build ${WORK}/library)
  run(${CMAKE_COMMAND} --install ${WORK}/library --prefix ${prefix})
  run(${consumer} -DUSE=package -DCMAKE_PREFIX_PATH=${prefix})
elseif(MODE STREQUAL "subdirectory")
  run(${consumer} -DUSE=subdirectory -DGDNFLOW_SOURCE=${SOURCE} -DGDNFLOW_CUDA=OFF)
elseif(MODE STREQUAL "fetch-content")
  run(${consumer} -DUSE=fetch-content -DGDNFLOW_SOURCE=${SOURCE} -DGDNFLOW_CUDA=OFF)
else()
  message(FATAL_ERROR "MODE: expected installed, shared, subdirectory or fetch-content, got '${MODE}'")
endif()

run(${CMAKE_COMMAND} --build ${WORK}/consumer)
run(${WORK}/consumer/consumer)

if(MODE STREQUAL "shared")
  # Nothing but the library's own names leaves it: no CUDA runtime, no fmt, no Eigen.
  file(GLOB library ${prefix}/lib*/libgdnflow.so ${prefix}/lib/*/libgdnflow.so)
  execute_process(COMMAND nm -D --defined-only --demangle ${library}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [TDBR] [^\n]*" defined "${symbols}")
  list(LENGTH defined count)
  list(FILTER defined EXCLUDE REGEX "gdnflow(::|_)")
  if(defined)
    list(JOIN defined "\n" defined)
    message(FATAL_ERROR "${library}: expected names of gdnflow alone, got:\n${defined}")
  endif()
  if(count LESS 10)
    message(FATAL_ERROR "${library}: expected the public functions, found ${count} names")
  endif()
endif()
file(REMOVE_RECURSE ${WORK})
