# cmake -DROOT=<source> -P includes.cmake: public headers include <gdnflow/...> and the standard
# library alone, so that linking the library asks for no other library's headers.

file(GLOB headers ${ROOT}/lib/include/gdnflow/*.hpp ${ROOT}/stages/include/gdnflow/*.hpp
  ${ROOT}/graph/include/gdnflow/*.hpp)
list(LENGTH headers count)
if(count EQUAL 0)
  message(FATAL_ERROR "expected public headers under ${ROOT}, found none")
endif()
foreach(header IN LISTS headers)
  file(STRINGS ${header} includes REGEX "^ *# *include")
  foreach(line IN LISTS includes)
    if(NOT line MATCHES "^#include <(gdnflow/[a-z_]+\\.hpp|[a-z_0-9]+)>")
      message(SEND_ERROR "${header}: expected <gdnflow/...> or a standard header, got: ${line}")
    endif()
  endforeach()
endforeach()
message(STATUS "${count} public headers")
