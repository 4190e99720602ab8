#ifndef GDNFLOW_GDNFLOW_H
#define GDNFLOW_GDNFLOW_H

/* The prefill forward pass from C. Tensors are DLPack's, borrowed for as long as they are bound;
 * nothing throws across this border. Every function that can fail returns a status and leaves what
 * it was given unchanged where it fails; gdnflow_error() then says why, in one line: what,
 * expected, got. Handles are used by one thread at a time; different ones share nothing. */

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define GDNFLOW_C_API
#else
#define GDNFLOW_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdnflow_status {
  GDNFLOW_OK = 0,
  GDNFLOW_INVALID_ARGUMENT = 1, /* a value, shape, type or stride that the call does not take */
  GDNFLOW_UNSUPPORTED = 2,      /* valid, but nothing here can serve it */
  GDNFLOW_INVALID_PIPELINE = 3, /* a pipeline that does not validate */
  GDNFLOW_FORMAT = 4,           /* contents that are not what a format demands */
  GDNFLOW_IO = 5,               /* the operating system refused */
  GDNFLOW_CUDA = 6,             /* a CUDA call failed */
  GDNFLOW_INTERNAL = 7,         /* a broken invariant of the library */
  GDNFLOW_OUT_OF_MEMORY = 8     /* of the host */
} gdnflow_status;

/* Why the last call of this thread that failed did so: one line, never null, valid until the next
 * one fails. */
GDNFLOW_C_API const char* gdnflow_error(void);

/* "0.1.0". */
GDNFLOW_C_API const char* gdnflow_version(void);

/* Everything that is fixed when kernels are chosen: gdnflow::Problem. A new one has its defaults.
 */
typedef struct gdnflow_problem gdnflow_problem;
GDNFLOW_C_API gdnflow_status gdnflow_problem_create(gdnflow_problem** problem);
GDNFLOW_C_API void gdnflow_problem_destroy(gdnflow_problem* problem);

/* Sets a field of gdnflow::Problem by its name: numbers in decimal ("qk_heads", "16"), flags as 0
 * or 1, types and choices by their names ("activation", "bf16"; "state_layout", "vk"; "gate",
 * "raw"). */
GDNFLOW_C_API gdnflow_status gdnflow_problem_set(gdnflow_problem* problem, const char* field,
                                                 const char* value);

/* A forward pass: a problem and its tensors. The problem is copied. */
typedef struct gdnflow_prefill gdnflow_prefill;
GDNFLOW_C_API gdnflow_status gdnflow_prefill_create(const gdnflow_problem* problem,
                                                    gdnflow_prefill** prefill);
GDNFLOW_C_API void gdnflow_prefill_destroy(gdnflow_prefill* prefill);

/* Binds a tensor by its name. The view is copied, its memory is not. Null: there is no such tensor.
 * T tokens, N sequences, P rows of a pool, K checkpoints, [r, c] = [d_k, d_v] for the layout kv and
 * [d_v, d_k] for vk; the last dimension is contiguous. Which ones a problem takes its fields say.
 *
 *   q, k            [T, Hqk, Dk] activation    cu_seqlens                [N+1] index
 *   v, o            [T, Hv, Dv] activation     prefix_lens               [N] index
 *   g, beta         [T, Hv] f32                state_indices             [N] i32, -1: zero
 *   a, b            [T, Hv] activation         output_state_indices      [N] i32, -1: skip
 *   a_log, dt_bias  [Hv] f32                   has_initial_state         [N] uint8 or bool
 *   initial_state   [N or P, Hv, r, c] state   checkpoints               [K or P, Hv, r, c] state
 *   final_state     the same                   checkpoint_state_indices  [K] i32, -1: skip */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_bind(gdnflow_prefill* prefill, const char* name,
                                                  const DLTensor* tensor);

/* The pipeline ("auto" at first, "one-pass", ...), and a stage's variant with its options, as
 * programs take them ("one_pass", "one-pass:value_tile=128"); null: none is asked for any more. */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_recipe(gdnflow_prefill* prefill, const char* recipe);
GDNFLOW_C_API gdnflow_status gdnflow_prefill_variant(gdnflow_prefill* prefill, const char* stage,
                                                     const char* choice);

/* How many sequences there are, all alike, where the problem has no cu_seqlens; 1 at first. */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_sequences(gdnflow_prefill* prefill, int64_t sequences);

/* Bytes of workspace that a run needs, for the extents of q and cu_seqlens and q's device, whose
 * memory need not be there yet. */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_workspace_bytes(const gdnflow_prefill* prefill,
                                                             int64_t* bytes);

/* One forward pass on the tensors' device: enqueued on `stream` (a cudaStream_t; null: the default
 * one) where that is a GPU, without waiting, and capturable; to completion on the host. The
 * workspace may have any alignment and is used by one stream at a time. */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_run(const gdnflow_prefill* prefill, void* workspace,
                                                 int64_t workspace_bytes, void* stream);

/* Graphs that have been made, the `most` used last: gdnflow::GraphCache. One a stream: a graph's
 * workspace serves one stream at a time. */
typedef struct gdnflow_graphs gdnflow_graphs;
GDNFLOW_C_API gdnflow_status gdnflow_graphs_create(size_t most, gdnflow_graphs** graphs);
GDNFLOW_C_API void gdnflow_graphs_destroy(gdnflow_graphs* graphs);

/* The same pass by a graph, which is made for the first one of its problem, extents and variants
 * and replayed from then on, with new pointers and lengths. It has a workspace of its own, which
 * goes when the graph does: by eviction, or with the cache. Making one, and its end, wait for the
 * device; a replay does not. On the host it runs without a graph. */
GDNFLOW_C_API gdnflow_status gdnflow_graphs_run(gdnflow_graphs* graphs,
                                                const gdnflow_prefill* prefill, void* stream);

typedef struct gdnflow_graphs_stats {
  uint64_t hits, misses, evictions;
  uint64_t entries;
  int64_t workspace_bytes; /* of the entries together */
} gdnflow_graphs_stats;
GDNFLOW_C_API gdnflow_status gdnflow_graphs_count(const gdnflow_graphs* graphs,
                                                  gdnflow_graphs_stats* stats);

#ifdef __cplusplus
}
#endif

#endif
