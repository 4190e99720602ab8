# The one library that users link, made of the objects of lib, stages and graph.

add_library(gdnflow
  $<TARGET_OBJECTS:gdnflow_core> $<TARGET_OBJECTS:gdnflow_stages> $<TARGET_OBJECTS:gdnflow_graph>)
add_library(gdnflow::gdnflow ALIAS gdnflow)
target_include_directories(gdnflow PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/stages/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/graph/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(gdnflow PUBLIC cxx_std_20)
set_target_properties(gdnflow PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_link_libraries(gdnflow PRIVATE $<BUILD_INTERFACE:gdnflow_flags>)
if(GDNFLOW_OPENMP)
  target_link_libraries(gdnflow PRIVATE OpenMP::OpenMP_CXX)
endif()
if(GDNFLOW_WITH_CUDA)
  target_link_libraries(gdnflow PRIVATE CUDA::cudart_static)
endif()
