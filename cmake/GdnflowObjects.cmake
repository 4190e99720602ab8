# gdnflow_add_objects(NAME HOST glob... [CUDA glob...] INCLUDE dir... [LINK target...])
#
# One of the object libraries that make up the library. A file named *.sm90a.cu is compiled for
# Hopper alone, and left out where 90a is not in the list: code that names such a file's functions
# asks `#if GDNFLOW_WITH_SM90A`.

function(gdnflow_add_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HOST;CUDA;INCLUDE;LINK")
  file(GLOB sources CONFIGURE_DEPENDS ${arg_HOST})
  set(cuda_sources "")
  if(GDNFLOW_WITH_CUDA AND arg_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${arg_CUDA})
  endif()
  set(hopper_sources ${cuda_sources})
  list(FILTER hopper_sources INCLUDE REGEX "\\.sm90a\\.cu$")
  list(FILTER cuda_sources EXCLUDE REGEX "\\.sm90a\\.cu$")

  if(NOT sources AND NOT cuda_sources)
    return()
  endif()
  add_library(${name} OBJECT ${sources} ${cuda_sources})
  set(targets ${name})
  if(GDNFLOW_WITH_SM90A AND hopper_sources)
    add_library(${name}_sm90a OBJECT ${hopper_sources})
    set_target_properties(${name}_sm90a PROPERTIES CUDA_ARCHITECTURES 90a-real)
    list(APPEND targets ${name}_sm90a)
  endif()
  foreach(target IN LISTS targets)
    target_include_directories(${target} PRIVATE ${arg_INCLUDE} ${PROJECT_BINARY_DIR}/include)
    target_compile_definitions(${target} PRIVATE
      GDNFLOW_WITH_CUDA=$<BOOL:${GDNFLOW_WITH_CUDA}>
      GDNFLOW_WITH_SM90A=$<BOOL:${GDNFLOW_WITH_SM90A}>)
    target_link_libraries(${target} PRIVATE gdnflow_flags ${GDNFLOW_LINK_LIBRARIES} ${arg_LINK})
    if(GDNFLOW_RESOURCE_REPORT AND GDNFLOW_WITH_CUDA)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
      # A list without an empty entry: newer CMakes would pass that on as a command.
      set(launcher ${PROJECT_SOURCE_DIR}/cmake/resource_log.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
      set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
    endif()
    set_property(GLOBAL APPEND PROPERTY GDNFLOW_OBJECTS $<TARGET_OBJECTS:${target}>)
  endforeach()
endfunction()
