#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace gdnflow::test {

/// Rows of choices such that every pair of values of every two factors stands in some row:
/// row[f] is below sizes[f]. Greedy and the same on every run; about as many rows as the two
/// largest factors have pairs.
inline std::vector<std::vector<int>> pairwise_cover(const std::vector<int>& sizes) {
  const std::size_t factors = sizes.size();
  // missing[a][b][i * sizes[b] + j]: the pair (a = i, b = j) has not been seen, a < b.
  std::vector<std::vector<std::vector<bool>>> missing(factors);
  std::size_t left = 0;
  for (std::size_t a = 0; a < factors; ++a) {
    missing[a].resize(factors);
    for (std::size_t b = a + 1; b < factors; ++b) {
      const auto pairs = static_cast<std::size_t>(sizes[a]) * static_cast<std::size_t>(sizes[b]);
      missing[a][b].assign(pairs, true);
      left += pairs;
    }
  }
  const auto is_missing = [&](std::size_t a, int i, std::size_t b, int j) {
    return a < b ? missing[a][b][i * sizes[b] + j] : missing[b][a][j * sizes[a] + i];
  };
  std::mt19937 random(1);
  std::vector<std::vector<int>> rows;
  while (left > 0) {
    // Start from a pair that is missing, then give each other factor the value that covers most.
    std::vector<int> row(factors, -1);
    for (std::size_t a = 0; a < factors && row[0] < 0; ++a) {
      for (std::size_t b = a + 1; b < factors; ++b) {
        bool found = false;
        for (std::size_t p = 0; p < missing[a][b].size() && !found; ++p) {
          if (!missing[a][b][p]) continue;
          row[a] = static_cast<int>(p) / sizes[b];
          row[b] = static_cast<int>(p) % sizes[b];
          found = true;
        }
        if (found) {
          a = factors;
          break;
        }
      }
    }
    for (std::size_t f = 0; f < factors; ++f) {
      if (row[f] >= 0) continue;
      int best = -1;
      int best_gain = -1;
      const int start = static_cast<int>(random() % static_cast<unsigned>(sizes[f]));
      for (int offset = 0; offset < sizes[f]; ++offset) {
        const int value = (start + offset) % sizes[f];
        int gain = 0;
        for (std::size_t other = 0; other < factors; ++other) {
          if (row[other] >= 0) gain += is_missing(f, value, other, row[other]) ? 1 : 0;
        }
        if (gain > best_gain) {
          best = value;
          best_gain = gain;
        }
      }
      row[f] = best;
    }
    for (std::size_t a = 0; a < factors; ++a) {
      for (std::size_t b = a + 1; b < factors; ++b) {
        const std::size_t pair = static_cast<std::size_t>(row[a] * sizes[b] + row[b]);
        if (missing[a][b][pair]) --left;
        missing[a][b][pair] = false;
      }
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace gdnflow::test
