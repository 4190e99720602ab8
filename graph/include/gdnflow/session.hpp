#pragma once

#include <gdnflow/device.hpp>
#include <gdnflow/export.hpp>
#include <gdnflow/prefill.hpp>
#include <gdnflow/problem.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace gdnflow {

/// Capacities for a session: tokens grow by `factor` from `least_tokens` to those of `most`, in
/// whole chunks; each holds the sequences of `most`. Errors: invalid_argument for a capacity below
/// 1, least_tokens below 1 or a factor that is not above 1.
GDNFLOW_API std::vector<Capacity> capacity_ladder(const Capacity& most,
                                                  std::int64_t least_tokens = 256,
                                                  double factor = 2.0);

struct SessionOptions {
  PrefillOptions prefill{};  ///< the same for every bucket
  bool graphs = true;        ///< on a GPU replay a captured graph; false: launch kernel by kernel
  bool programmatic = true;  ///< as in ExecutorOptions
};

struct SessionStats {
  std::uint64_t calls = 0;
  std::uint64_t hits = 0;      ///< calls whose bucket was built already
  std::uint64_t captures = 0;  ///< executors built, by calls or `prepare`; on a GPU each is a graph
  std::uint64_t rebinds = 0;   ///< calls of a built bucket that changed a pointer, stride or extent
  std::int64_t workspace_bytes = 0;  ///< of intermediates: what the buckets share
  std::int64_t graph_bytes = 0;  ///< by which the device's free memory fell while executors were
                                 ///< built: graphs, and kernels that were loaded for the first
                                 ///< time. Of what others allocated meanwhile it knows nothing
};

/// Prefill in a serving loop: an executor a bucket of capacities, so that any batch is a replay.
/// Lengths stay on the device; the host gives no more than bounds for them. One stream, or one
/// order of work, at a time uses a session; several sessions share nothing and may run at once, on
/// any threads, streams and devices.
///
/// Tensors need not fit a bucket. Of those with T rows the first rows up to the bucket's are bound,
/// or as many as the shortest has: persistent buffers of the largest size and tensors made for one
/// step serve alike, and nothing is copied. No row that a tensor does not have is touched. Of those
/// with N rows exactly the first `sequences` are bound (of cu_seqlens one more), so what an
/// earlier, larger batch left behind them is never looked at.
class GDNFLOW_API PrefillSession {
 public:
  /// Plans every bucket; allocates nothing on the device. Errors: invalid_argument for no buckets,
  /// a problem of dense sequences, or prefill.behind_callers with programmatic launches switched
  /// off; those of validate and make_pipeline.
  PrefillSession(const Problem& problem, std::vector<Capacity> buckets, Device device,
                 SessionOptions options = {});
  ~PrefillSession();
  PrefillSession(PrefillSession&&) noexcept;
  PrefillSession& operator=(PrefillSession&&) noexcept;

  /// Without duplicates, by tokens, then by sequences.
  std::span<const Capacity> buckets() const noexcept;
  /// The first bucket that holds this much. Errors: invalid_argument for negative numbers, or more
  /// than any holds.
  std::size_t bucket_for(std::int64_t tokens, std::int64_t sequences) const;

  /// Bytes of workspace that a bucket needs, and that all of them need, which share it.
  std::int64_t workspace_bytes(std::size_t bucket) const;
  std::int64_t workspace_bytes() const noexcept;
  /// Gives the session memory for intermediates, on its device and of any alignment. Without it the
  /// session allocates its own when it first builds. Errors: invalid_argument for too few bytes or
  /// a null pointer, or where something is built already.
  void set_workspace(void* memory, std::int64_t bytes);

  /// Builds every bucket that is not built, bound to these tensors (with any number of rows), so
  /// that no later call does. Waits. Errors: as `run`.
  void prepare(const PrefillTensors& tensors);

  /// One forward pass, enqueued on `stream` (run to completion on the host), in the smallest bucket
  /// for `tokens` and `sequences`: upper bounds, of which cu_seqlens on the device says the rest.
  /// Every tensor of T rows has at least `tokens`, every one of N at least `sequences`. After the
  /// first call in a bucket it allocates nothing and waits for nothing; where tensors are the same
  /// as in the bucket's call before, it binds nothing.
  /// `stream` may be one that the caller is capturing, in any mode and for a bucket not built yet:
  /// the caller's graph gets the kernels, with these pointers and row counts and on this session's
  /// workspace, so keep the session as long, and replay in order with its other calls.
  /// Returns the bucket. Errors: invalid_argument, one line with what, expected and got, before
  /// anything is launched; unsupported; cuda.
  const Capacity& run(const PrefillTensors& tensors, std::int64_t tokens, std::int64_t sequences,
                      Stream stream = nullptr);

  SessionStats stats() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gdnflow
