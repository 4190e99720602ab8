#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <gdnflow/device.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

// The test programs' main. It adds two things to doctest's: a selection that holds no test is an
// error, and the GPU tests are skipped, with a count, where there is no device.

namespace {

/// Learns how many test cases the command line selects, without running them.
struct Count : doctest::IReporter {
  static inline unsigned selected = 0;

  explicit Count(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData& query) override {
    selected = query.run_stats->numTestCasesPassingFilters;
  }
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
DOCTEST_REGISTER_REPORTER("selected", 1, Count);

unsigned count_selected(int argc, char** argv) {
  doctest::Context context;
  context.applyCommandLine(argc, argv);
  context.setOption("reporters", "selected");
  context.setOption("count", true);
  context.run();
  return Count::selected;
}

/// doctest's options that list or explain instead of running.
bool is_query(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](std::string_view argument) {
    for (const char* query : {"-h", "--help", "-?", "-c", "--count", "-v", "--version"}) {
      if (argument == query) return true;
    }
    return argument.substr(0, 3) == "-lt" || argument.substr(0, 6) == "--list";
  });
}

constexpr int exit_skipped = 77;  // ctest's SKIP_RETURN_CODE in cmake/GdnflowTest.cmake

}  // namespace

int main(int argc, char** argv) {
  if (!is_query(argc, argv)) {
    const unsigned selected = count_selected(argc, argv);
    if (selected == 0) {
      std::fputs("no test case matches the selection\n", stderr);
      return EXIT_FAILURE;
    }
#ifdef GDNFLOW_TEST_NEEDS_GPU
    if (gdnflow::cuda_device_count() == 0) {
      if (std::getenv("GDNFLOW_REQUIRE_GPU") != nullptr) {
        std::fputs("GDNFLOW_REQUIRE_GPU is set: expected a CUDA device, found none\n", stderr);
        return EXIT_FAILURE;
      }
      std::printf("no CUDA device: %u GPU test case%s skipped\n", selected,
                  selected == 1 ? "" : "s");
      return exit_skipped;
    }
#endif
  }
  doctest::Context context(argc, argv);
  return context.run();
}
