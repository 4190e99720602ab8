#ifndef GDNFLOW_GDNFLOW_H
#define GDNFLOW_GDNFLOW_H

/* The prefill forward pass from C. Tensors are DLPack's, borrowed for as long as they are bound;
 * nothing throws across this border. Every function that can fail returns a status and leaves what
 * it was given unchanged where it fails; gdnflow_error() then says why, in one line: what,
 * expected, got. Handles are used by one thread at a time; different ones share nothing. */

#include <gdnflow/version.h>

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

/* The version of the library that is linked, "0.1.0"; GDNFLOW_VERSION, and in numbers
 * GDNFLOW_VERSION_MAJOR, _MINOR and _PATCH, are those of this header. */
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

/* Texts of many lines are given as snprintf gives them: at most `size` bytes of `text`, with the
 * zero at the end, and cut where there is more; `length`, unless it is null, becomes the length of
 * the whole without the zero. So a size of 0, for which the text may be null, asks for it. */

/* The fields in their order, a line each: the name, a tab, the value as `set` takes it. */
GDNFLOW_C_API gdnflow_status gdnflow_problem_fields(const gdnflow_problem* problem, char* text,
                                                    size_t size, size_t* length);

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

/* Not 0: what comes first may start while the caller's kernel in front drains; 0 at first.
 * ExecutorOptions::behind_callers says what that kernel has to do for it. */
GDNFLOW_C_API gdnflow_status gdnflow_prefill_behind_callers(gdnflow_prefill* prefill, int32_t on);

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

/* The most tokens and sequences of a batch: gdnflow::Capacity. */
typedef struct gdnflow_capacity {
  int64_t tokens, sequences;
} gdnflow_capacity;

/* Capacities for a session: tokens grow by `factor`, above 1, from `least_tokens` to those of
 * `most`, in whole chunks of 64; each holds the sequences of `most`. At most *count are written,
 * the smallest first; *count becomes how many there are. With a *count of 0, `buckets` may be
 * null. */
GDNFLOW_C_API gdnflow_status gdnflow_capacity_ladder(gdnflow_capacity most, int64_t least_tokens,
                                                     double factor, gdnflow_capacity* buckets,
                                                     size_t* count);

/* A stage's variant with its options, as in gdnflow_prefill_variant; neither may be null. */
typedef struct gdnflow_variant {
  const char* stage;
  const char* choice;
} gdnflow_variant;

/* All zero: the defaults. */
typedef struct gdnflow_session_options {
  const char* recipe;              /* null: "auto" */
  const gdnflow_variant* variants; /* [variant_count]; may be null where there are none */
  size_t variant_count;
  int32_t eager;            /* not 0: on a GPU launch kernel by kernel, without graphs */
  int32_t not_programmatic; /* not 0: a kernel starts when the one in front has ended, not while it
                             * drains */
  int32_t behind_callers;   /* as in gdnflow_prefill_behind_callers */
} gdnflow_session_options;

/* Prefill in a serving loop: a graph a bucket, on the host an executor, so that any batch is a
 * replay: gdnflow::PrefillSession, whose header says what a call does with tensors of more rows
 * than the batch has. One stream at a time uses a session; several share nothing. */
typedef struct gdnflow_session gdnflow_session;

/* Plans `count` buckets, at least one; allocates nothing on the device. The problem, which has
 * cu_seqlens, and the options (null: the defaults) are copied. */
GDNFLOW_C_API gdnflow_status gdnflow_session_create(const gdnflow_problem* problem,
                                                    const gdnflow_capacity* buckets, size_t count,
                                                    DLDevice device,
                                                    const gdnflow_session_options* options,
                                                    gdnflow_session** session);
/* Its graphs and its workspace go with it: wait for its runs first. */
GDNFLOW_C_API void gdnflow_session_destroy(gdnflow_session* session);

/* As gdnflow_prefill_bind, for the calls that follow. */
GDNFLOW_C_API gdnflow_status gdnflow_session_bind(gdnflow_session* session, const char* name,
                                                  const DLTensor* tensor);

/* The buckets without duplicates, by tokens, then by sequences, in the way of
 * gdnflow_capacity_ladder. */
GDNFLOW_C_API gdnflow_status gdnflow_session_buckets(const gdnflow_session* session,
                                                     gdnflow_capacity* buckets, size_t* count);

/* Bytes of workspace, which the buckets share. Memory of the caller's for it, of any alignment, is
 * given before anything is built, or the session allocates its own. */
GDNFLOW_C_API gdnflow_status gdnflow_session_workspace_bytes(const gdnflow_session* session,
                                                             int64_t* bytes);
GDNFLOW_C_API gdnflow_status gdnflow_session_workspace(gdnflow_session* session, void* workspace,
                                                       int64_t bytes);

/* Builds every bucket that is not built, for the tensors that are bound, so that no later run
 * does. Waits. */
GDNFLOW_C_API gdnflow_status gdnflow_session_prepare(gdnflow_session* session);

/* One forward pass in the smallest bucket for `tokens` and `sequences`, upper bounds of which
 * cu_seqlens on the device says the rest: every tensor of T rows has at least `tokens`, every one
 * of N at least `sequences`. Enqueued on `stream` (a cudaStream_t, which may be being captured;
 * null: the default one), to completion on the host. `bucket`, unless it is null, becomes the one
 * that served. What is refused is refused before anything is launched. */
GDNFLOW_C_API gdnflow_status gdnflow_session_run(gdnflow_session* session, int64_t tokens,
                                                 int64_t sequences, void* stream,
                                                 gdnflow_capacity* bucket);

typedef struct gdnflow_session_stats {
  uint64_t calls;
  uint64_t hits;     /* calls whose bucket was built already */
  uint64_t captures; /* executors built; on a GPU each is a graph */
  uint64_t rebinds;  /* calls of a built bucket that changed a pointer, stride or extent */
  int64_t workspace_bytes;
  int64_t graph_bytes; /* by which the device's free memory fell while executors were built */
} gdnflow_session_stats;
GDNFLOW_C_API gdnflow_status gdnflow_session_count(const gdnflow_session* session,
                                                   gdnflow_session_stats* stats);

/* CUDA devices that can be used: 0 where there is no driver, no device, or no CUDA build. */
GDNFLOW_C_API int32_t gdnflow_device_count(void);

/* gdnflow::DeviceInfo. */
typedef struct gdnflow_device_info {
  char name[256];                          /* ends with a zero */
  int32_t capability;                      /* 10 * major + minor; 0 on the host */
  int32_t multiprocessors;                 /* threads on the host */
  int32_t driver_version, runtime_version; /* as CUDA gives them; 0 on the host */
  int64_t shared_bytes_per_block;          /* the opt-in limit */
  int64_t l2_bytes, memory_bytes;
} gdnflow_device_info;
/* Of kDLCPU or kDLCUDA. */
GDNFLOW_C_API gdnflow_status gdnflow_device_query(DLDevice device, gdnflow_device_info* info);

/* What the recipe "auto" takes for a problem, the capacity and the device, and why: every pipeline
 * with its predicted time, or with the reason why it cannot run. */
GDNFLOW_C_API gdnflow_status gdnflow_explain(const gdnflow_problem* problem,
                                             gdnflow_capacity capacity, DLDevice device, char* text,
                                             size_t size, size_t* length);

/* The recipes, a line each: id, tab, description. */
GDNFLOW_C_API gdnflow_status gdnflow_recipes(char* text, size_t size, size_t* length);

/* The variants of every stage, a line each with tabs between: the stage, the variant, host or cuda,
 * its options with the values that they take ("value_tile=0,64,128;segments=0,1"), description. */
GDNFLOW_C_API gdnflow_status gdnflow_variants(char* text, size_t size, size_t* length);

#ifdef __cplusplus
}
#endif

#endif
