#pragma once

/// Marks functions that host and device code share in one source.
#if defined(__CUDACC__)
#define GDNFLOW_HOST_DEVICE __host__ __device__
#else
#define GDNFLOW_HOST_DEVICE
#endif
