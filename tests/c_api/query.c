/* What there is, from C: version, devices, recipes, variants, fields and explanations; texts that
 * do not fit; and errors that threads keep apart. Returns 0 where all is as it should be. */

#include "support.h"

#include <pthread.h>

static char text[1 << 16];

/* The lines of a text that begin with `start`. */
static int lines_with(const char* start) {
  int count = 0;
  const char* line = text;
  while (line != NULL && *line != 0) {
    if (strncmp(line, start, strlen(start)) == 0) ++count;
    line = strchr(line, '\n');
    if (line != NULL) ++line;
  }
  return count;
}

static void check_texts(void) {
  size_t length = 0, again = 0;
  char small[6];
  CHECK(gdnflow_recipes(NULL, 0, &length) == GDNFLOW_OK);
  CHECK(length > 0);
  CHECK(gdnflow_recipes(text, sizeof text, &again) == GDNFLOW_OK);
  CHECK(again == length && strlen(text) == length);
  CHECK(lines_with("residual\t") == 1 && lines_with("auto\t") == 1);
  CHECK(gdnflow_recipes(small, sizeof small, NULL) == GDNFLOW_OK);
  CHECK(strlen(small) == sizeof small - 1 && strncmp(small, text, sizeof small - 1) == 0);
  check_refused(gdnflow_recipes(NULL, 8, &length), GDNFLOW_INVALID_ARGUMENT,
                "text: expected a pointer for 8 bytes");
  CHECK(gdnflow_variants(text, sizeof text, &length) == GDNFLOW_OK && length < sizeof text);
  CHECK(lines_with("kkt_solve\thost\thost\t") == 1);
}

static void check_devices(void) {
  const DLDevice host = {kDLCPU, 0};
  DLDevice missing = {kDLCUDA, 0};
  gdnflow_device_info info;
  memset(&info, 0xff, sizeof info);
  CHECK(gdnflow_device_query(host, &info) == GDNFLOW_OK);
  CHECK(memchr(info.name, 0, sizeof info.name) != NULL);
  CHECK(info.capability == 0 && info.multiprocessors > 0);
  CHECK(gdnflow_device_count() >= 0);
  missing.device_id = gdnflow_device_count();
  CHECK(gdnflow_device_query(missing, &info) != GDNFLOW_OK);
  CHECK(info.multiprocessors > 0);
  check_refused(gdnflow_device_query(host, NULL), GDNFLOW_INVALID_ARGUMENT, "info");
}

static void check_problem(gdnflow_problem* problem) {
  const DLDevice host = {kDLCPU, 0};
  const gdnflow_capacity capacity = {256, 2}, none = {-1, 1};
  gdnflow_problem* copy = NULL;
  static char fields[1 << 12];
  char* line;
  size_t length = 0;
  CHECK(gdnflow_problem_set(problem, "v_heads", "64") == GDNFLOW_OK);
  CHECK(gdnflow_problem_set(problem, "state_layout", "vk") == GDNFLOW_OK);
  CHECK(gdnflow_problem_set(problem, "mode", "batch_invariant") == GDNFLOW_OK);
  CHECK(gdnflow_problem_fields(problem, text, sizeof text, &length) == GDNFLOW_OK);
  CHECK(lines_with("v_heads\t64\n") == 1 && lines_with("state_layout\tvk\n") == 1);
  CHECK(lines_with("activation\tbf16\n") == 1 && lines_with("cu_seqlens\t1\n") == 1);
  CHECK(lines_with("mode\tbatch_invariant\n") == 1);
  /* Each value is one that `set` takes. */
  CHECK(length < sizeof fields);
  memcpy(fields, text, length + 1);
  CHECK(gdnflow_problem_create(&copy) == GDNFLOW_OK);
  for (line = fields; *line != 0;) {
    char* const tab = strchr(line, '\t');
    char* const end = strchr(line, '\n');
    CHECK(tab != NULL && end != NULL && tab < end);
    if (tab == NULL || end == NULL) break;
    *tab = *end = 0;
    CHECK(gdnflow_problem_set(copy, line, tab + 1) == GDNFLOW_OK);
    line = end + 1;
  }
  memcpy(fields, text, length + 1);
  CHECK(gdnflow_problem_fields(copy, text, sizeof text, &length) == GDNFLOW_OK);
  CHECK(strcmp(text, fields) == 0);
  gdnflow_problem_destroy(copy);

  CHECK(gdnflow_explain(problem, capacity, host, text, sizeof text, &length) == GDNFLOW_OK);
  CHECK(strstr(text, "residual") != NULL);
  check_refused(gdnflow_explain(problem, none, host, text, sizeof text, &length),
                GDNFLOW_INVALID_ARGUMENT, "max_tokens");
  check_refused(gdnflow_explain(NULL, capacity, host, text, sizeof text, &length),
                GDNFLOW_INVALID_ARGUMENT, "problem");
}

/* Fails once, in a thread of its own. */
static void* fail_elsewhere(void* problem) {
  static char message[256];
  if (gdnflow_error()[0] != 0) return NULL;
  if (gdnflow_problem_set(problem, "elsewhere", "1") != GDNFLOW_INVALID_ARGUMENT) return NULL;
  strncpy(message, gdnflow_error(), sizeof message - 1);
  return strstr(gdnflow_error(), "got 'elsewhere'") != NULL ? message : NULL;
}

int main(void) {
  gdnflow_problem* problem = NULL;
  char expected[64];
  pthread_t thread;
  void* message = NULL;
  snprintf(expected, sizeof expected, "%d.%d.%d", GDNFLOW_VERSION_MAJOR, GDNFLOW_VERSION_MINOR,
           GDNFLOW_VERSION_PATCH);
  CHECK(strcmp(expected, GDNFLOW_VERSION) == 0);
  CHECK(strcmp(gdnflow_version(), GDNFLOW_VERSION) == 0);
  check_texts();
  check_devices();
  CHECK(gdnflow_problem_create(&problem) == GDNFLOW_OK);
  check_problem(problem);

  check_refused(gdnflow_problem_set(problem, "here", "1"), GDNFLOW_INVALID_ARGUMENT, "got 'here'");
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, problem) == 0);
  CHECK(pthread_join(thread, &message) == 0);
  CHECK(message != NULL);
  CHECK(strstr(gdnflow_error(), "got 'here'") != NULL);
  gdnflow_problem_destroy(problem);
  return failed;
}
