# cmake -DLIBRARY=FILE -DMOST_BYTES=N -P size.cmake: fails where the file is larger.
file(SIZE "${LIBRARY}" bytes)
message(STATUS "${LIBRARY} has ${bytes} bytes, ${MOST_BYTES} at most")
if(bytes GREATER MOST_BYTES)
  message(FATAL_ERROR "the library is too large")
endif()
