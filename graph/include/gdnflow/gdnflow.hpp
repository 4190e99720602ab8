#pragma once

// Everything: types, stages, pipelines, executors and the one-call API.
#include <gdnflow/cache.hpp>
#include <gdnflow/choice.hpp>
#include <gdnflow/compare.hpp>
#include <gdnflow/costs.hpp>
#include <gdnflow/device.hpp>
#include <gdnflow/dtype.hpp>
#include <gdnflow/error.hpp>
#include <gdnflow/executor.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/pipeline.hpp>
#include <gdnflow/plan.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/registry.hpp>
#include <gdnflow/safetensors.hpp>
#include <gdnflow/session.hpp>
#include <gdnflow/stage.hpp>
#include <gdnflow/stages.hpp>
#include <gdnflow/step.hpp>
#include <gdnflow/tensor.hpp>
#include <gdnflow/version.hpp>
