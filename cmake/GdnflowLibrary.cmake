# The one library that users link, made of the objects of lib, stages and graph, and its package.

get_property(objects GLOBAL PROPERTY GDNFLOW_OBJECTS)
add_library(gdnflow ${objects})
add_library(gdnflow::gdnflow ALIAS gdnflow)
target_include_directories(gdnflow PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/stages/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/graph/include>
  $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
if(TARGET gdnflow_dlpack)
  target_include_directories(gdnflow PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/graph/c_api/include>)
endif()
target_compile_features(gdnflow PUBLIC cxx_std_20)
set_target_properties(gdnflow PROPERTIES
  LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_link_libraries(gdnflow PRIVATE $<BUILD_INTERFACE:gdnflow_flags> ${GDNFLOW_LINK_LIBRARIES})
if(BUILD_SHARED_LIBS AND NOT APPLE)
  # What is linked in statically, the CUDA runtime above all, stays inside.
  target_link_options(gdnflow PRIVATE LINKER:--exclude-libs,ALL)
endif()

if(GDNFLOW_INSTALL)
  include(CMakePackageConfigHelpers)
  set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/gdnflow)
  foreach(part IN ITEMS lib stages graph)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/${part}/include/ TYPE INCLUDE FILES_MATCHING PATTERN *.hpp)
  endforeach()
  if(TARGET gdnflow_dlpack)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/graph/c_api/include/ TYPE INCLUDE FILES_MATCHING PATTERN *.h)
  endif()
  install(DIRECTORY ${PROJECT_BINARY_DIR}/include/ TYPE INCLUDE FILES_MATCHING REGEX "[.](h|hpp)$")
  install(TARGETS gdnflow EXPORT gdnflowTargets)
  install(EXPORT gdnflowTargets NAMESPACE gdnflow:: DESTINATION ${package_folder})
  configure_package_config_file(cmake/gdnflowConfig.cmake.in
    ${PROJECT_BINARY_DIR}/gdnflowConfig.cmake INSTALL_DESTINATION ${package_folder})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/gdnflowConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/gdnflowConfig.cmake
    ${PROJECT_BINARY_DIR}/gdnflowConfigVersion.cmake
    ${PROJECT_SOURCE_DIR}/cmake/gdnflowFindCudaToolkit.cmake DESTINATION ${package_folder})
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()
