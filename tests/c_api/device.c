/* The C interface on a device's own tensors: the host's in bf16, and a GPU's where there is one.
 * One call on a stream, the same by a cache of graphs, a session, and on a GPU a session in the
 * caller's capture, each against fp32 on the host. With GDNFLOW_REQUIRE_GPU a GPU has to be there.
 * Returns 0 where all is as it should be. */

#include "support.h"

#include <math.h>
#include <stdlib.h>

#if GDNFLOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum { tokens = 200, sequences = 2, slots = 3, qk_heads = 1, v_heads = 2, dim = 128 };
enum {
  qk_count = tokens * qk_heads * dim,
  v_count = tokens * v_heads * dim,
  gate_count = tokens * v_heads,
  state_count = slots * v_heads * dim * dim
};
enum { q, k, v, a, b, a_log, dt_bias, starts, initial, slot_of, started, final, o, tensor_count };

static const char* const names[tensor_count] = {"q",
                                                "k",
                                                "v",
                                                "a",
                                                "b",
                                                "a_log",
                                                "dt_bias",
                                                "cu_seqlens",
                                                "initial_state",
                                                "state_indices",
                                                "has_initial_state",
                                                "final_state",
                                                "o"};
static const int outputs[] = {final, o};

static const DLDataType f32 = {kDLFloat, 32, 1};
static const DLDataType bf16 = {kDLBfloat, 16, 1};

static float values[tensor_count][state_count]; /* of the floating ones */
static int32_t starts_values[sequences + 1] = {0, 137, tokens};
static int32_t slot_values[sequences] = {2, 0};
static uint8_t started_values[sequences] = {1, 0};
static float expected[tensor_count][state_count];

static int64_t qk_shape[] = {tokens, qk_heads, dim};
static int64_t v_shape[] = {tokens, v_heads, dim};
static int64_t gate_shape[] = {tokens, v_heads};
static int64_t head_shape[] = {v_heads};
static int64_t starts_shape[] = {sequences + 1};
static int64_t sequence_shape[] = {sequences};
static int64_t state_shape[] = {slots, v_heads, dim, dim};

/* Memory of a device's. */
static void* take(DLDevice device, size_t bytes) {
  void* memory = NULL;
#if GDNFLOW_WITH_CUDA
  if (device.device_type == kDLCUDA) {
    CHECK(cudaMalloc(&memory, bytes) == cudaSuccess);
    return memory;
  }
#endif
  memory = malloc(bytes);
  CHECK(memory != NULL && device.device_type == kDLCPU);
  return memory;
}
static void give(DLDevice device, void* memory) {
#if GDNFLOW_WITH_CUDA
  if (device.device_type == kDLCUDA) {
    CHECK(cudaFree(memory) == cudaSuccess);
    return;
  }
#endif
  if (device.device_type == kDLCPU) free(memory);
}
/* Waits for all that has been launched. */
static void copy(DLDevice device, void* to, const void* from, size_t bytes) {
#if GDNFLOW_WITH_CUDA
  if (device.device_type == kDLCUDA) {
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess); /* small copies may still be on their way */
    return;
  }
#endif
  if (device.device_type == kDLCPU) memcpy(to, from, bytes);
}

/* A number that bf16 has, too. */
static float truncated(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits &= 0xffff0000U;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static void fill(int tensor, size_t count, float low, float high) {
  size_t i;
  for (i = 0; i < count; ++i) {
    values[tensor][i] = truncated(low + (high - low) * (next_number() + 0.5F));
  }
}

static size_t count_of(const DLTensor* tensor) {
  size_t count = 1;
  int i;
  for (i = 0; i < tensor->ndim; ++i) count *= (size_t)tensor->shape[i];
  return count;
}
static size_t bytes_of(const DLTensor* tensor) { return count_of(tensor) * tensor->dtype.bits / 8; }

/* The problem's tensors in a device's memory; q, k, v, a, b and o of type `activation`. */
static void make_tensors(DLTensor* tensors, DLDevice device, DLDataType activation) {
  const DLDataType i32 = {kDLInt, 32, 1};
  const DLDataType u8 = {kDLUInt, 8, 1};
  static uint16_t narrow[v_count];
  int t;
  tensors[q] = tensor_of(values[q], activation, 3, qk_shape);
  tensors[k] = tensor_of(values[k], activation, 3, qk_shape);
  tensors[v] = tensor_of(values[v], activation, 3, v_shape);
  tensors[a] = tensor_of(values[a], activation, 2, gate_shape);
  tensors[b] = tensor_of(values[b], activation, 2, gate_shape);
  tensors[a_log] = tensor_of(values[a_log], f32, 1, head_shape);
  tensors[dt_bias] = tensor_of(values[dt_bias], f32, 1, head_shape);
  tensors[starts] = tensor_of(starts_values, i32, 1, starts_shape);
  tensors[initial] = tensor_of(values[initial], f32, 4, state_shape);
  tensors[slot_of] = tensor_of(slot_values, i32, 1, sequence_shape);
  tensors[started] = tensor_of(started_values, u8, 1, sequence_shape);
  tensors[final] = tensor_of(values[final], f32, 4, state_shape);
  tensors[o] = tensor_of(values[o], activation, 3, v_shape);
  for (t = 0; t < tensor_count; ++t) {
    const void* from = tensors[t].data;
    size_t i;
    if (tensors[t].dtype.bits == 16) {
      const float* wide = tensors[t].data;
      for (i = 0; i < count_of(&tensors[t]); ++i) {
        uint32_t bits;
        memcpy(&bits, &wide[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
      }
      from = narrow;
    }
    tensors[t].device = device;
    tensors[t].data = take(device, bytes_of(&tensors[t]));
    copy(device, tensors[t].data, from, bytes_of(&tensors[t]));
  }
}

/* An output, as numbers. */
static void read_output(const DLTensor* tensor, float* to) {
  static uint16_t narrow[v_count];
  size_t i;
  if (tensor->dtype.bits == 32) {
    copy(tensor->device, to, tensor->data, bytes_of(tensor));
    return;
  }
  copy(tensor->device, narrow, tensor->data, bytes_of(tensor));
  for (i = 0; i < count_of(tensor); ++i) {
    uint32_t bits = (uint32_t)narrow[i] << 16;
    memcpy(&to[i], &bits, sizeof to[i]);
  }
}

/* Outputs are NaN until they are written. */
static void poison(const DLTensor* tensors) {
  static unsigned char nan[sizeof(float) * state_count];
  size_t i;
  memset(nan, 0xff, sizeof nan);
  for (i = 0; i < sizeof outputs / sizeof outputs[0]; ++i) {
    copy(tensors[outputs[i]].device, tensors[outputs[i]].data, nan, bytes_of(&tensors[outputs[i]]));
  }
}

/* Rows that were to be written are right; a slot that nobody has is as it was. */
static void check_outputs(const DLTensor* tensors) {
  static float got[state_count];
  const size_t slot = state_count / slots;
  size_t i, n;
  for (n = 0; n < sizeof outputs / sizeof outputs[0]; ++n) {
    const float* const right = expected[outputs[n]];
    double difference = 0, size = 0;
    read_output(&tensors[outputs[n]], got);
    for (i = 0; i < count_of(&tensors[outputs[n]]); ++i) {
      if (outputs[n] == final && i / slot == 1) {
        CHECK(isnan(got[i]));
        continue;
      }
      difference += ((double)got[i] - right[i]) * ((double)got[i] - right[i]);
      size += (double)right[i] * right[i];
    }
    CHECK(size > 0 && difference <= 1e-4 * size); /* relative RMS of 1e-2 */
  }
}

static gdnflow_problem* make_problem(const char* activation) {
  const char* const settings[][2] = {
      {"qk_heads", "1"},      {"v_heads", "2"},          {"qk_dim", "128"}, {"v_dim", "128"},
      {"gate", "raw"},        {"beta", "logit"},         {"qk_norm", "1"},  {"initial_state", "1"},
      {"state_indices", "1"}, {"has_initial_state", "1"}};
  gdnflow_problem* problem = NULL;
  size_t i;
  CHECK(gdnflow_problem_create(&problem) == GDNFLOW_OK);
  CHECK(gdnflow_problem_set(problem, "activation", activation) == GDNFLOW_OK);
  for (i = 0; i < sizeof settings / sizeof settings[0]; ++i) {
    CHECK(gdnflow_problem_set(problem, settings[i][0], settings[i][1]) == GDNFLOW_OK);
  }
  return problem;
}

static gdnflow_prefill* make_prefill(const gdnflow_problem* problem, const DLTensor* tensors) {
  gdnflow_prefill* prefill = NULL;
  int t;
  CHECK(gdnflow_prefill_create(problem, &prefill) == GDNFLOW_OK);
  for (t = 0; t < tensor_count; ++t) {
    CHECK(gdnflow_prefill_bind(prefill, names[t], &tensors[t]) == GDNFLOW_OK);
  }
  return prefill;
}

static void run_once(const gdnflow_prefill* prefill, DLDevice device, void* stream) {
  int64_t bytes = -1;
  void* workspace;
  CHECK(gdnflow_prefill_workspace_bytes(prefill, &bytes) == GDNFLOW_OK && bytes >= 0);
  workspace = take(device, (size_t)bytes + 1);
  CHECK(gdnflow_prefill_run(prefill, workspace, bytes, stream) == GDNFLOW_OK);
#if GDNFLOW_WITH_CUDA
  if (device.device_type == kDLCUDA) CHECK(cudaDeviceSynchronize() == cudaSuccess);
#endif
  give(device, workspace);
}

static void check_session(const gdnflow_problem* problem, const DLTensor* tensors, DLDevice device,
                          void* stream) {
  const gdnflow_capacity buckets[] = {{256, sequences}, {1024, 4}};
  gdnflow_capacity served = {0, 0};
  gdnflow_session* session = NULL;
  gdnflow_session_stats stats;
  int t;
  CHECK(gdnflow_session_create(problem, buckets, 2, device, NULL, &session) == GDNFLOW_OK);
  for (t = 0; t < tensor_count; ++t) {
    CHECK(gdnflow_session_bind(session, names[t], &tensors[t]) == GDNFLOW_OK);
  }
  for (t = 0; t < 2; ++t) {
    poison(tensors);
    CHECK(gdnflow_session_run(session, tokens, sequences, stream, &served) == GDNFLOW_OK);
    CHECK(served.tokens == 256 && served.sequences == sequences);
    check_outputs(tensors);
  }
#if GDNFLOW_WITH_CUDA
  if (device.device_type == kDLCUDA) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t captured = NULL;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(gdnflow_session_run(session, tokens, sequences, stream, NULL) == GDNFLOW_OK);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&captured, graph, 0) == cudaSuccess);
    poison(tensors);
    CHECK(cudaGraphLaunch(captured, stream) == cudaSuccess);
    check_outputs(tensors);
    CHECK(cudaGraphExecDestroy(captured) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
  }
#endif
  CHECK(gdnflow_session_count(session, &stats) == GDNFLOW_OK);
  CHECK(stats.captures == 1 && stats.calls >= 2);
  gdnflow_session_destroy(session);
}

static void check_device(DLDevice device, void* stream) {
  gdnflow_problem* const problem = make_problem("bf16");
  gdnflow_graphs* graphs = NULL;
  gdnflow_graphs_stats stats;
  gdnflow_prefill* prefill;
  DLTensor tensors[tensor_count];
  int t;
  make_tensors(tensors, device, bf16);
  prefill = make_prefill(problem, tensors);
  poison(tensors);
  run_once(prefill, device, stream);
  check_outputs(tensors);

  CHECK(gdnflow_graphs_create(1, &graphs) == GDNFLOW_OK);
  for (t = 0; t < 2; ++t) {
    poison(tensors);
    CHECK(gdnflow_graphs_run(graphs, prefill, stream) == GDNFLOW_OK);
    check_outputs(tensors);
  }
  CHECK(gdnflow_graphs_count(graphs, &stats) == GDNFLOW_OK);
  CHECK(stats.misses == 1 && stats.hits == 1);
  gdnflow_graphs_destroy(graphs);
  gdnflow_prefill_destroy(prefill);

  check_session(problem, tensors, device, stream);
  gdnflow_problem_destroy(problem);
  for (t = 0; t < tensor_count; ++t) give(device, tensors[t].data);
}

/* What is right, by the host in fp32. */
static void find_expected(DLDevice host) {
  gdnflow_problem* const problem = make_problem("f32");
  gdnflow_prefill* prefill;
  DLTensor tensors[tensor_count];
  int t;
  make_tensors(tensors, host, f32);
  prefill = make_prefill(problem, tensors);
  run_once(prefill, host, NULL);
  read_output(&tensors[final], expected[final]);
  read_output(&tensors[o], expected[o]);
  gdnflow_prefill_destroy(prefill);
  gdnflow_problem_destroy(problem);
  for (t = 0; t < tensor_count; ++t) give(host, tensors[t].data);
}

int main(void) {
  const DLDevice host = {kDLCPU, 0};
  const char* required = getenv("GDNFLOW_REQUIRE_GPU");
  fill(q, qk_count, -1, 1);
  fill(k, qk_count, -1, 1);
  fill(v, v_count, -1, 1);
  fill(a, gate_count, -4, 0);
  fill(b, gate_count, -3, 3);
  fill(a_log, v_heads, -2, 1);
  fill(dt_bias, v_heads, -1, 1);
  fill(initial, state_count, -1, 1);
  find_expected(host);
  check_device(host, NULL);
  if (gdnflow_device_count() == 0) {
    CHECK(required == NULL || strcmp(required, "1") != 0);
    fprintf(stderr, "no GPU that can be used: the host's part alone\n");
    return failed;
  }
#if GDNFLOW_WITH_CUDA
  {
    const DLDevice gpu = {kDLCUDA, 0};
    cudaStream_t stream = NULL;
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    check_device(gpu, stream);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  }
#endif
  return failed;
}
