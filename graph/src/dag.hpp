#pragma once

#include <gdnflow/pipeline.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gdnflow {

/// Who precedes whom in a pipeline, closed under transitivity: a row of bits a node.
class Ancestors {
 public:
  /// `order` respects the predecessors of `nodes`.
  Ancestors(std::span<const Node> nodes, std::span<const int> order)
      : words_((nodes.size() + 63) / 64), bits_(nodes.size() * words_, 0) {
    for (const int node : order) {
      for (const int predecessor : nodes[node].predecessors) {
        for (std::size_t w = 0; w < words_; ++w) row(node)[w] |= row(predecessor)[w];
        row(node)[predecessor / 64] |= std::uint64_t{1} << (predecessor % 64);
      }
    }
  }

  /// Whether `first` must finish before `second` starts. Never true of a node and itself.
  bool precedes(int first, int second) const noexcept {
    return (bits_[second * words_ + first / 64] >> (first % 64) & 1) != 0;
  }

 private:
  std::uint64_t* row(int node) noexcept { return bits_.data() + node * words_; }

  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

}  // namespace gdnflow
