#pragma once

#include <gdnflow/gdnflow.h>
#include <gdnflow/prefill.hpp>
#include <gdnflow/tensor.hpp>

#include <string_view>

namespace gdnflow::c_api {

/// Errors: invalid_argument, beginning with `name`, for another device than a host or CUDA one.
Device device_of(const DLDevice& device, std::string_view name);

/// A view of the same memory. Errors: invalid_argument, beginning with `name`, for a rank, type,
/// extent or device that no view has.
TensorView view_of(const DLTensor& tensor, std::string_view name);

/// Sets the tensor of this name, or with null takes it away. Errors: invalid_argument for an
/// unknown name, and as `view_of`.
void bind(PrefillTensors& tensors, const char* name, const DLTensor* tensor);

}  // namespace gdnflow::c_api
