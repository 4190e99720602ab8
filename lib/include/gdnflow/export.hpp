#pragma once

/// Symbols are hidden unless marked: GDNFLOW_API names what a shared library offers.
#if defined(_WIN32)
#define GDNFLOW_API
#else
#define GDNFLOW_API __attribute__((visibility("default")))
#endif
