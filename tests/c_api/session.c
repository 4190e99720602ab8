/* Sessions from C, on the host: prompts in pieces by slots of a pool, the smallest bucket for each
 * step, buffers larger than the batch, and what is refused. Returns 0 where all is as it should
 * be. */

#include "support.h"

#include <math.h>
#include <stdlib.h>

enum {
  tokens = 160,
  sequences = 4,
  slots = 3,
  qk_heads = 1,
  v_heads = 2,
  dim = 8,
  tensor_count = 11
};
enum { prompt = 100, v_row = v_heads * dim, qk_row = qk_heads * dim, state = v_heads * dim * dim };

static float q[tokens * qk_row], k[tokens * qk_row], v[tokens * v_row], o[tokens * v_row];
static float g[tokens * v_heads], beta[tokens * v_heads], pool[slots * state];
static int32_t starts[sequences + 1], slot_of[sequences];
static uint8_t started[sequences];

/* A prompt that is served whole and in pieces. */
static float prompt_q[prompt * qk_row], prompt_k[prompt * qk_row], prompt_v[prompt * v_row];
static float prompt_g[prompt * v_heads], prompt_beta[prompt * v_heads];

static void fill(float* values, size_t count, float low, float high) {
  size_t i;
  for (i = 0; i < count; ++i) values[i] = low + (high - low) * (next_number() + 0.5F);
}

/* Tokens [first, first + count) of the prompt, as rows from `at`. */
static void put(int at, int first, int count) {
  memcpy(q + at * qk_row, prompt_q + first * qk_row, sizeof(float) * count * qk_row);
  memcpy(k + at * qk_row, prompt_k + first * qk_row, sizeof(float) * count * qk_row);
  memcpy(v + at * v_row, prompt_v + first * v_row, sizeof(float) * count * v_row);
  memcpy(g + at * v_heads, prompt_g + first * v_heads, sizeof(float) * count * v_heads);
  memcpy(beta + at * v_heads, prompt_beta + first * v_heads, sizeof(float) * count * v_heads);
}

static int close_to(const float* a, const float* b, size_t count) {
  size_t i;
  for (i = 0; i < count; ++i) {
    if (!(fabs(a[i] - b[i]) <= 1e-5 * (1 + fabs(b[i])))) return 0;
  }
  return 1;
}

static void bind_all(gdnflow_session* session, DLTensor* tensors, const char* const* names) {
  size_t i;
  for (i = 0; i < tensor_count; ++i) {
    CHECK(gdnflow_session_bind(session, names[i], &tensors[i]) == GDNFLOW_OK);
  }
}

static void check_ladder(void) {
  const gdnflow_capacity most = {1000, 7};
  gdnflow_capacity buckets[8];
  size_t count = 0;
  CHECK(gdnflow_capacity_ladder(most, 100, 2, NULL, &count) == GDNFLOW_OK);
  CHECK(count == 5);
  count = 2;
  memset(buckets, 0, sizeof buckets);
  CHECK(gdnflow_capacity_ladder(most, 100, 2, buckets, &count) == GDNFLOW_OK);
  CHECK(count == 5 && buckets[0].tokens == 128 && buckets[1].tokens == 256);
  CHECK(buckets[1].sequences == 7 && buckets[2].tokens == 0);
  check_refused(gdnflow_capacity_ladder(most, 100, 1, buckets, &count), GDNFLOW_INVALID_ARGUMENT,
                "factor above 1");
  check_refused(gdnflow_capacity_ladder(most, 100, 2, buckets, NULL), GDNFLOW_INVALID_ARGUMENT,
                "count: expected a pointer");
}

int main(void) {
  const DLDataType f32 = {kDLFloat, 32, 1};
  const DLDataType i32 = {kDLInt, 32, 1};
  const DLDataType u8 = {kDLUInt, 8, 1};
  const DLDevice host = {kDLCPU, 0};
  const DLDevice nowhere = {kDLVulkan, 0};
  int64_t qk_shape[] = {tokens, qk_heads, dim};
  int64_t v_shape[] = {tokens, v_heads, dim};
  int64_t gate_shape[] = {tokens, v_heads};
  int64_t starts_shape[] = {sequences + 1};
  int64_t sequence_shape[] = {sequences};
  int64_t pool_shape[] = {slots, v_heads, dim, dim};
  DLTensor tensors[tensor_count];
  const char* const names[tensor_count] = {"q",
                                           "k",
                                           "v",
                                           "g",
                                           "beta",
                                           "cu_seqlens",
                                           "initial_state",
                                           "final_state",
                                           "state_indices",
                                           "has_initial_state",
                                           "o"};
  const char* const settings[][2] = {{"qk_heads", "1"},      {"v_heads", "2"},
                                     {"qk_dim", "8"},        {"v_dim", "8"},
                                     {"activation", "f32"},  {"initial_state", "1"},
                                     {"state_indices", "1"}, {"has_initial_state", "1"}};
  const gdnflow_capacity buckets[] = {{tokens, sequences}, {64, sequences}, {64, sequences}};
  const gdnflow_variant variant = {"one_pass", "recurrent"};
  gdnflow_session_options options;
  gdnflow_capacity served = {0, 0}, there[4];
  gdnflow_problem* problem = NULL;
  gdnflow_session* session = NULL;
  gdnflow_session_stats stats;
  float whole[v_row], whole_state[state];
  int64_t bytes = -1;
  size_t count = 4, i;
  char* workspace;

  fill(prompt_q, prompt * qk_row, -0.5F, 0.5F);
  fill(prompt_k, prompt * qk_row, -0.5F, 0.5F);
  fill(prompt_v, prompt * v_row, -1, 1);
  fill(prompt_g, prompt * v_heads, -0.1F, 0);
  fill(prompt_beta, prompt * v_heads, 0, 1);
  /* A fresh prompt must not see what a slot holds. */
  fill(pool, slots * state, 1e6F, 2e6F);
  check_ladder();

  CHECK(gdnflow_problem_create(&problem) == GDNFLOW_OK);
  for (i = 0; i < sizeof settings / sizeof settings[0]; ++i) {
    CHECK(gdnflow_problem_set(problem, settings[i][0], settings[i][1]) == GDNFLOW_OK);
  }
  check_refused(gdnflow_session_create(problem, buckets, 0, host, NULL, &session),
                GDNFLOW_INVALID_ARGUMENT, "at least one capacity");
  check_refused(gdnflow_session_create(problem, NULL, 1, host, NULL, &session),
                GDNFLOW_INVALID_ARGUMENT, "buckets: expected a pointer");
  check_refused(gdnflow_session_create(problem, buckets, 3, nowhere, NULL, &session),
                GDNFLOW_INVALID_ARGUMENT, "device: expected kDLCPU or kDLCUDA");
  check_refused(gdnflow_session_create(NULL, buckets, 3, host, NULL, &session),
                GDNFLOW_INVALID_ARGUMENT, "problem: expected a pointer");
  memset(&options, 0, sizeof options);
  options.recipe = "fast";
  check_refused(gdnflow_session_create(problem, buckets, 3, host, &options, &session),
                GDNFLOW_INVALID_ARGUMENT, "got 'fast'");
  options.recipe = "recurrent";
  options.variant_count = 1;
  check_refused(gdnflow_session_create(problem, buckets, 3, host, &options, &session),
                GDNFLOW_INVALID_ARGUMENT, "variants: expected a pointer");
  options.variants = &variant;
  /* A variant for GPUs alone. */
  CHECK(gdnflow_session_create(problem, buckets, 3, host, &options, &session) != GDNFLOW_OK);
  CHECK(session == NULL);
  options.recipe = "residual";
  options.variant_count = 0;
  options.behind_callers = 1;
  options.not_programmatic = 1;
  check_refused(gdnflow_session_create(problem, buckets, 3, host, &options, &session),
                GDNFLOW_INVALID_ARGUMENT, "behind_callers: expected programmatic launches");
  options.not_programmatic = 0;
  CHECK(gdnflow_session_create(problem, buckets, 3, host, &options, &session) == GDNFLOW_OK);
  gdnflow_problem_destroy(problem);

  CHECK(gdnflow_session_buckets(session, there, &count) == GDNFLOW_OK);
  CHECK(count == 2 && there[0].tokens == 64 && there[1].tokens == tokens);
  CHECK(gdnflow_session_workspace_bytes(session, &bytes) == GDNFLOW_OK && bytes > 0);
  check_refused(gdnflow_session_workspace(session, NULL, bytes), GDNFLOW_INVALID_ARGUMENT,
                "null pointer");
  workspace = malloc((size_t)bytes);
  check_refused(gdnflow_session_workspace(session, workspace, bytes - 1), GDNFLOW_INVALID_ARGUMENT,
                "workspace: expected at least");
  CHECK(gdnflow_session_workspace(session, workspace, bytes) == GDNFLOW_OK);

  tensors[0] = tensor_of(q, f32, 3, qk_shape);
  tensors[1] = tensor_of(k, f32, 3, qk_shape);
  tensors[2] = tensor_of(v, f32, 3, v_shape);
  tensors[3] = tensor_of(g, f32, 2, gate_shape);
  tensors[4] = tensor_of(beta, f32, 2, gate_shape);
  tensors[5] = tensor_of(starts, i32, 1, starts_shape);
  tensors[6] = tensor_of(pool, f32, 4, pool_shape);
  tensors[7] = tensors[6];
  tensors[8] = tensor_of(slot_of, i32, 1, sequence_shape);
  tensors[9] = tensor_of(started, u8, 1, sequence_shape);
  tensors[10] = tensor_of(o, f32, 3, v_shape);
  check_refused(gdnflow_session_run(session, 1, 1, NULL, NULL), GDNFLOW_INVALID_ARGUMENT,
                "q: expected");
  bind_all(session, tensors, names);
  CHECK(gdnflow_session_prepare(session) == GDNFLOW_OK);

  /* The prompt in slot 0, and its first 60 tokens in slot 2. */
  put(0, 0, prompt);
  put(prompt, 0, 60);
  starts[1] = prompt;
  starts[2] = prompt + 60;
  slot_of[1] = 2;
  CHECK(gdnflow_session_run(session, prompt + 60, 2, NULL, &served) == GDNFLOW_OK);
  CHECK(served.tokens == tokens && served.sequences == sequences);
  memcpy(whole, o + (prompt - 1) * v_row, sizeof whole);
  memcpy(whole_state, pool, sizeof whole_state);
  CHECK(close_to(o + prompt * v_row, o, 60 * v_row));

  /* The rest from slot 2. What the step before has left behind it is not looked at. */
  put(0, 60, 40);
  starts[1] = 40;
  slot_of[0] = 2;
  started[0] = 1;
  CHECK(gdnflow_session_run(session, 40, 1, NULL, &served) == GDNFLOW_OK);
  CHECK(served.tokens == 64);
  CHECK(close_to(o + 39 * v_row, whole, v_row));
  CHECK(close_to(pool + 2 * state, whole_state, state));
  CHECK(memcmp(pool, whole_state, sizeof whole_state) == 0);

  check_refused(gdnflow_session_run(session, tokens + 1, 1, NULL, &served),
                GDNFLOW_INVALID_ARGUMENT, "got 161 tokens");
  check_refused(gdnflow_session_run(session, -1, 1, NULL, &served), GDNFLOW_INVALID_ARGUMENT, "-1");
  CHECK(served.tokens == 64);
  CHECK(gdnflow_session_bind(session, "g", NULL) == GDNFLOW_OK);
  check_refused(gdnflow_session_run(session, 40, 1, NULL, NULL), GDNFLOW_INVALID_ARGUMENT,
                "g: expected");
  check_refused(gdnflow_session_bind(session, "h", &tensors[0]), GDNFLOW_INVALID_ARGUMENT,
                "got 'h'");
  CHECK(gdnflow_session_count(session, &stats) == GDNFLOW_OK);
  CHECK(stats.calls == 2 && stats.hits == 2 && stats.captures == 2);
  CHECK(stats.workspace_bytes == bytes && stats.graph_bytes == 0);
  check_refused(gdnflow_session_count(session, NULL), GDNFLOW_INVALID_ARGUMENT, "stats");
  check_refused(gdnflow_session_run(NULL, 1, 1, NULL, NULL), GDNFLOW_INVALID_ARGUMENT, "session");

  gdnflow_session_destroy(session);
  gdnflow_session_destroy(NULL);
  free(workspace);
  return failed;
}
