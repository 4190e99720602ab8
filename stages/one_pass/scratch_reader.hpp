#pragma once

#include <gdnflow/stage.hpp>

#include <cstddef>

namespace gdnflow::stages::one_pass {

/// The pieces of a call's scratch in turn, in the order in which they were asked for.
class ScratchReader {
 public:
  explicit ScratchReader(const StageCall& call) : call_(&call) {}

  template <class T>
  T* next() {
    return call_->scratch[number_++].as<T>();
  }

 private:
  const StageCall* call_;
  std::size_t number_ = 0;
};

}  // namespace gdnflow::stages::one_pass
