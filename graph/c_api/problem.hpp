#pragma once

#include <gdnflow/gdnflow.h>
#include <gdnflow/problem.hpp>

struct gdnflow_problem {
  gdnflow::Problem value;
};
