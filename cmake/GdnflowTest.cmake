# gdnflow_add_test_area(NAME [INTERNALS])
#
# Builds tests/NAME/*.cpp (and *.cu with CUDA) into the program gdnflow-test-NAME and gives ctest one
# test for each source file, "NAME.file". INTERNALS: the tests also include and link what the
# library keeps to itself.

# A shared library hides its internals; tests of them link the same objects as an archive.
if(BUILD_SHARED_LIBS AND NOT TARGET gdnflow_internals)
  get_property(objects GLOBAL PROPERTY GDNFLOW_OBJECTS)
  add_library(gdnflow_internals STATIC EXCLUDE_FROM_ALL ${objects})
  set_target_properties(gdnflow_internals PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(gdnflow_internals PUBLIC
    $<TARGET_PROPERTY:gdnflow,INTERFACE_INCLUDE_DIRECTORIES>)
  target_link_libraries(gdnflow_internals PUBLIC ${GDNFLOW_LINK_LIBRARIES})
elseif(NOT TARGET gdnflow_internals)
  add_library(gdnflow_internals ALIAS gdnflow)
endif()

# Checks take longer to compile than to run. Sanitizers leave out the suite "long", whose cases are
# of numbers and times.
set(test_options "")
set(test_arguments "")
if(GDNFLOW_SANITIZE)
  set(test_options $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  set(test_arguments --test-suite-exclude=long)
elseif(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(test_options $<$<COMPILE_LANGUAGE:CXX>:-O1>)
endif()

file(GLOB support CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/support/*.cpp)
add_library(gdnflow-test-support OBJECT ${support})
target_compile_options(gdnflow-test-support PRIVATE ${test_options})
target_link_libraries(gdnflow-test-support PRIVATE gdnflow_flags doctest::doctest)
target_include_directories(gdnflow-test-support PRIVATE ${PROJECT_SOURCE_DIR}/tests
  $<TARGET_PROPERTY:gdnflow,INTERFACE_INCLUDE_DIRECTORIES>)

function(gdnflow_add_test_area area)
  cmake_parse_arguments(PARSE_ARGV 1 arg "INTERNALS" "" "")
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${area}/*.cpp)
  if(GDNFLOW_WITH_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${area}/*.cu)
    list(APPEND sources ${cuda_sources})
  endif()
  if(NOT sources)
    message(STATUS "gdnflow: no tests in tests/${area}")
    return()
  endif()
  set(target gdnflow-test-${area})
  add_executable(${target} ${sources} $<TARGET_OBJECTS:gdnflow-test-support>)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${GDNFLOW_TEST_OUTPUT})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${target} PRIVATE
    GDNFLOW_TEST_DATA="${GDNFLOW_TEST_DATA}"
    GDNFLOW_BIN_DIR="${GDNFLOW_TEST_PROGRAMS}"
    GDNFLOW_DELAY_ROLES=$<BOOL:${GDNFLOW_DELAY_ROLES}>
    GDNFLOW_WITH_CUDA=$<BOOL:${GDNFLOW_WITH_CUDA}>)
  target_compile_options(${target} PRIVATE ${test_options})
  target_link_libraries(${target} PRIVATE gdnflow_flags doctest::doctest ${GDNFLOW_FMT}
    nlohmann_json::nlohmann_json Eigen3::Eigen)
  if(arg_INTERNALS)
    target_link_libraries(${target} PRIVATE gdnflow_internals)
    target_include_directories(${target} PRIVATE
      ${PROJECT_SOURCE_DIR}/lib ${PROJECT_SOURCE_DIR}/stages ${PROJECT_SOURCE_DIR}/graph)
  else()
    target_link_libraries(${target} PRIVATE gdnflow::gdnflow)
  endif()
  if(GDNFLOW_WITH_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
  if(area STREQUAL "apps")
    # The tests run the programs, so whatever apps/ builds comes first.
    get_property(programs DIRECTORY ${PROJECT_SOURCE_DIR}/apps PROPERTY BUILDSYSTEM_TARGETS)
    add_dependencies(${target} ${programs})
  endif()

  foreach(source IN LISTS sources)
    get_filename_component(file ${source} NAME)
    get_filename_component(name ${source} NAME_WE)
    add_test(NAME ${area}.${name} COMMAND ${target} "--source-file=*/tests/${area}/${file}" ${test_arguments}
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    # 77 is what a program returns when it had to skip everything: no GPU.
    set_tests_properties(${area}.${name} PROPERTIES LABELS ${area} TIMEOUT 600 SKIP_RETURN_CODE 77)
    if(area STREQUAL "gpu")
      set_tests_properties(${area}.${name} PROPERTIES RUN_SERIAL ON)
    endif()
  endforeach()
endfunction()
