#pragma once

#include <gdnflow/executor.hpp>
#include <gdnflow/inputs.hpp>
#include <gdnflow/oracle.hpp>
#include <gdnflow/problem.hpp>
#include <gdnflow/tensor.hpp>

#include "common/device.hpp"

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace gdnflow::apps {

/// A dense tensor and its memory.
struct OwnedTensor {
  Memory memory;
  TensorView view;
};

OwnedTensor make_tensor(Device device, DType type, std::span<const std::int64_t> extents);
/// A dense host tensor on a device in another type of the same kind (floating or integer), rounded
/// to nearest even. Errors: invalid_argument for a change of kind or an integer that does not fit.
OwnedTensor copy_to(Device device, const TensorView& host, DType type);
/// A dense tensor copied to the host as it is.
OwnedTensor copy_to_host(const TensorView& tensor);

/// The first rows of a dense tensor.
TensorView first_rows(TensorView tensor, std::int64_t rows);
/// `rows` rows of a dense tensor from row `first` on.
TensorView rows_of(TensorView tensor, std::int64_t first, std::int64_t rows);
/// Copies a dense tensor into another of the same size on the same device; enqueued on a GPU.
void copy_tensor(const TensorView& from, const TensorView& to, Stream stream);
/// A dense tensor's memory under other extents of the same product.
TensorView reshaped(const TensorView& tensor, std::span<const std::int64_t> extents);

/// Tensors by the names of gdnflow/stages.hpp.
using TensorMap = std::map<std::string, OwnedTensor, std::less<>>;

/// The tensors of a forward pass on a device, with the lengths they are for.
struct Workload {
  Problem problem;
  Capacity capacity;
  Device device{};
  std::vector<std::int64_t> cu_seqlens;  ///< [N+1], what the device tensor holds
  TensorMap tensors;
  TensorMap ready{};  ///< log decay and beta where `tensors` has a, a_log, dt_bias or b for them

  std::int64_t tokens() const { return cu_seqlens.back(); }
  const TensorView& view(std::string_view name) const { return tensors.find(name)->second.view; }
  Bindings bindings() const;
  /// Other lengths within the capacity: as many sequences, at most max_tokens tokens together.
  void set_lengths(std::span<const std::int64_t> lengths);
  /// The inputs of the sequences' tokens, for the oracle (log decay and ready beta).
  OracleInputs oracle_inputs() const;
  /// Fills o and final_state with bytes 0xff (NaN), so that a result that was never written shows.
  void poison_outputs() const;
};

/// Allocates and fills every tensor that the problem has; gates of any form but alpha.
/// `lengths` has one entry a sequence and may sum to less than the capacity.
Workload make_workload(const Problem& problem, const Capacity& capacity,
                       std::span<const std::int64_t> lengths, Distribution distribution,
                       std::uint64_t seed, Device device);

/// [0, a, a+b, ...].
std::vector<std::int64_t> offsets_of(std::span<const std::int64_t> lengths);

/// Allocates o and final_state.
void add_outputs(Workload& workload);
/// Extents of a tensor of states for `rows` sequences.
std::vector<std::int64_t> state_extents(const Problem& problem, std::int64_t rows);

}  // namespace gdnflow::apps
