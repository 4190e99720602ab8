/* The C interface from C: a forward pass on the host, once with a workspace and twice by a cache,
 * and what is refused. Returns 0 where all is as it should be. */

#include "support.h"

#include <math.h>
#include <stdlib.h>

enum { tokens = 100, sequences = 2, qk_heads = 1, v_heads = 2, dim = 8 };

static float q[tokens * qk_heads * dim], k[tokens * qk_heads * dim];
static float v[tokens * v_heads * dim], o[tokens * v_heads * dim], again[tokens * v_heads * dim];
static float g[tokens * v_heads], beta[tokens * v_heads];
static float initial[sequences * v_heads * dim * dim], final[sequences * v_heads * dim * dim];
static int32_t starts[sequences + 1] = {0, 37, tokens};

/* The recurrence as it stands, token by token, in double. */
static double expected_of(int token, int head, int column) {
  static double state[dim][dim];
  double out = 0;
  int begin = token < starts[1] ? starts[0] : starts[1];
  int n = token < starts[1] ? 0 : 1;
  int t, i, j;
  for (i = 0; i < dim; ++i) {
    for (j = 0; j < dim; ++j) state[i][j] = initial[((n * v_heads + head) * dim + i) * dim + j];
  }
  for (t = begin; t <= token; ++t) {
    const float* key = &k[t * dim];
    const float* query = &q[t * dim];
    double alpha = exp((double)g[t * v_heads + head]);
    for (j = 0; j < dim; ++j) {
      double seen = 0;
      for (i = 0; i < dim; ++i) {
        state[i][j] *= alpha;
        seen += state[i][j] * key[i];
      }
      for (i = 0; i < dim; ++i) {
        state[i][j] +=
            beta[t * v_heads + head] * (v[(t * v_heads + head) * dim + j] - seen) * key[i];
      }
    }
    out = 0;
    for (i = 0; i < dim; ++i) out += query[i] * state[i][column];
  }
  return out / sqrt((double)dim);
}

static void check_outputs(const float* got) {
  const int at[] = {0, 36, 37, 64, 99};
  size_t i;
  int head, column;
  for (i = 0; i < sizeof at / sizeof at[0]; ++i) {
    for (head = 0; head < v_heads; ++head) {
      for (column = 0; column < dim; ++column) {
        double x = got[(at[i] * v_heads + head) * dim + column];
        double y = expected_of(at[i], head, column);
        CHECK(fabs(x - y) <= 1e-4 * (1 + fabs(y)));
      }
    }
  }
}

int main(void) {
  const DLDataType f32 = {kDLFloat, 32, 1};
  const DLDataType i32 = {kDLInt, 32, 1};
  const DLDataType f64 = {kDLFloat, 64, 1};
  int64_t qk_shape[] = {tokens, qk_heads, dim};
  int64_t v_shape[] = {tokens, v_heads, dim};
  int64_t gate_shape[] = {tokens, v_heads};
  int64_t starts_shape[] = {sequences + 1};
  int64_t state_shape[] = {sequences, v_heads, dim, dim};
  DLTensor tensors[9];
  const char* const names[] = {"q",           "k", "v", "g", "beta", "cu_seqlens", "initial_state",
                               "final_state", "o"};
  const char* const settings[][2] = {
      {"qk_heads", "1"},     {"v_heads", "2"},       {"qk_dim", "8"}, {"v_dim", "8"},
      {"activation", "f32"}, {"initial_state", "1"}, {"scale", "0"},  {"state_layout", "kv"}};
  gdnflow_problem* problem = NULL;
  gdnflow_prefill* prefill = NULL;
  gdnflow_graphs* graphs = NULL;
  gdnflow_graphs_stats stats;
  int64_t bytes = -1;
  void* workspace;
  size_t i;

  for (i = 0; i < sizeof q / sizeof q[0]; ++i) q[i] = next_number();
  for (i = 0; i < sizeof k / sizeof k[0]; ++i) k[i] = next_number();
  for (i = 0; i < sizeof v / sizeof v[0]; ++i) v[i] = next_number();
  for (i = 0; i < sizeof g / sizeof g[0]; ++i) g[i] = 0.1F * (next_number() - 0.5F);
  for (i = 0; i < sizeof beta / sizeof beta[0]; ++i) beta[i] = 0.5F + next_number();
  for (i = 0; i < sizeof initial / sizeof initial[0]; ++i) initial[i] = next_number();

  CHECK(strchr(gdnflow_version(), '.') != NULL);
  CHECK(gdnflow_problem_create(&problem) == GDNFLOW_OK);
  for (i = 0; i < sizeof settings / sizeof settings[0]; ++i) {
    CHECK(gdnflow_problem_set(problem, settings[i][0], settings[i][1]) == GDNFLOW_OK);
  }
  check_refused(gdnflow_problem_set(problem, "heads", "1"), GDNFLOW_INVALID_ARGUMENT,
                "got 'heads'");
  check_refused(gdnflow_problem_set(problem, "v_heads", "two"), GDNFLOW_INVALID_ARGUMENT,
                "got 'two'");
  check_refused(gdnflow_problem_set(problem, "gate", "raw "), GDNFLOW_INVALID_ARGUMENT,
                "log_decay");
  check_refused(gdnflow_problem_set(NULL, "v_heads", "2"), GDNFLOW_INVALID_ARGUMENT, "got NULL");
  check_refused(gdnflow_problem_create(NULL), GDNFLOW_INVALID_ARGUMENT, "got NULL");

  CHECK(gdnflow_prefill_create(problem, &prefill) == GDNFLOW_OK);
  gdnflow_problem_destroy(problem);
  tensors[0] = tensor_of(q, f32, 3, qk_shape);
  tensors[1] = tensor_of(k, f32, 3, qk_shape);
  tensors[2] = tensor_of(v, f32, 3, v_shape);
  tensors[3] = tensor_of(g, f32, 2, gate_shape);
  tensors[4] = tensor_of(beta, f32, 2, gate_shape);
  tensors[5] = tensor_of(starts, i32, 1, starts_shape);
  tensors[6] = tensor_of(initial, f32, 4, state_shape);
  tensors[7] = tensor_of(final, f32, 4, state_shape);
  tensors[8] = tensor_of(o, f32, 3, v_shape);
  check_refused(gdnflow_prefill_run(prefill, NULL, 0, NULL), GDNFLOW_INVALID_ARGUMENT,
                "q: expected");
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    CHECK(gdnflow_prefill_bind(prefill, names[i], &tensors[i]) == GDNFLOW_OK);
  }
  tensors[0].dtype = f64;
  check_refused(gdnflow_prefill_bind(prefill, "q", &tensors[0]), GDNFLOW_INVALID_ARGUMENT,
                "64 bits");
  check_refused(gdnflow_prefill_bind(prefill, "w", &tensors[1]), GDNFLOW_INVALID_ARGUMENT,
                "got 'w'");
  check_refused(gdnflow_prefill_recipe(prefill, "fast"), GDNFLOW_INVALID_ARGUMENT, "got 'fast'");
  check_refused(gdnflow_prefill_sequences(prefill, 0), GDNFLOW_INVALID_ARGUMENT, "got 0");
  check_refused(gdnflow_prefill_behind_callers(NULL, 1), GDNFLOW_INVALID_ARGUMENT, "prefill");
  CHECK(gdnflow_prefill_behind_callers(prefill, 1) == GDNFLOW_OK);

  CHECK(gdnflow_prefill_workspace_bytes(prefill, &bytes) == GDNFLOW_OK);
  CHECK(bytes >= 0);
  workspace = malloc((size_t)bytes + 1);
  if (bytes > 0) {
    check_refused(gdnflow_prefill_run(prefill, workspace, bytes - 1, NULL),
                  GDNFLOW_INVALID_ARGUMENT, "workspace: expected at least");
  }
  CHECK(gdnflow_prefill_run(prefill, workspace, bytes, NULL) == GDNFLOW_OK);
  check_outputs(o);

  /* By a cache: made once, then bound to other memory. */
  CHECK(gdnflow_graphs_create(2, &graphs) == GDNFLOW_OK);
  tensors[8].data = again;
  CHECK(gdnflow_prefill_bind(prefill, "o", &tensors[8]) == GDNFLOW_OK);
  CHECK(gdnflow_graphs_run(graphs, prefill, NULL) == GDNFLOW_OK);
  CHECK(memcmp(o, again, sizeof o) == 0);
  starts[1] = 64;
  tensors[8].data = o;
  CHECK(gdnflow_prefill_bind(prefill, "o", &tensors[8]) == GDNFLOW_OK);
  CHECK(gdnflow_graphs_run(graphs, prefill, NULL) == GDNFLOW_OK);
  check_outputs(o);
  CHECK(gdnflow_graphs_count(graphs, &stats) == GDNFLOW_OK);
  CHECK(stats.hits == 1 && stats.misses == 1 && stats.entries == 1);

  /* What is bound no more is not taken from the run before. */
  CHECK(gdnflow_prefill_bind(prefill, "beta", NULL) == GDNFLOW_OK);
  check_refused(gdnflow_graphs_run(graphs, prefill, NULL), GDNFLOW_INVALID_ARGUMENT,
                "beta: expected");
  CHECK(gdnflow_prefill_bind(prefill, "beta", &tensors[4]) == GDNFLOW_OK);
  check_refused(gdnflow_prefill_bind(prefill, "no\nname", NULL), GDNFLOW_INVALID_ARGUMENT,
                "'no name'");

  /* Another recipe is another graph; one that cannot run says why. */
  CHECK(gdnflow_prefill_recipe(prefill, "recurrent") == GDNFLOW_OK);
  CHECK(gdnflow_graphs_run(graphs, prefill, NULL) == GDNFLOW_OK);
  check_outputs(o);
  check_refused(gdnflow_prefill_variant(prefill, "one_pass", "warp:x=y"), GDNFLOW_INVALID_ARGUMENT,
                "x=y");
  CHECK(gdnflow_prefill_variant(prefill, "one_pass", "warp") == GDNFLOW_OK);
  CHECK(gdnflow_prefill_run(prefill, workspace, bytes, NULL) != GDNFLOW_OK);
  CHECK(gdnflow_prefill_variant(prefill, "one_pass", NULL) == GDNFLOW_OK);
  CHECK(gdnflow_prefill_bind(prefill, "beta", NULL) == GDNFLOW_OK);
  check_refused(gdnflow_prefill_run(prefill, workspace, bytes, NULL), GDNFLOW_INVALID_ARGUMENT,
                "beta: expected");

  free(workspace);
  gdnflow_graphs_destroy(graphs);
  gdnflow_prefill_destroy(prefill);
  gdnflow_graphs_destroy(NULL);
  gdnflow_prefill_destroy(NULL);
  gdnflow_problem_destroy(NULL);
  return failed;
}
