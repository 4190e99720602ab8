#ifndef GDNFLOW_TESTS_C_API_SUPPORT_H
#define GDNFLOW_TESTS_C_API_SUPPORT_H

/* What the programs in C share: checks that are counted, tensors of the host's, numbers. */

#include <gdnflow/gdnflow.h>

#include <stdio.h>
#include <string.h>

static int failed = 0;

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, gdnflow_error()); \
      failed = 1;                                                                           \
    }                                                                                       \
  } while (0)

/* A dense tensor of the host's. */
static inline DLTensor tensor_of(void* data, DLDataType type, int rank, int64_t* shape) {
  DLTensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.device.device_type = kDLCPU;
  tensor.ndim = rank;
  tensor.dtype = type;
  tensor.shape = shape;
  return tensor;
}

/* Small numbers without a library: the same everywhere. */
static inline float next_number(void) {
  static uint32_t seed = 1;
  seed = seed * 1664525U + 1013904223U;
  return (float)(seed >> 8) / 16777216.0F - 0.5F;
}

static inline void check_refused(gdnflow_status status, gdnflow_status expected, const char* part) {
  CHECK(status == expected);
  CHECK(strstr(gdnflow_error(), part) != NULL);
}

#endif
