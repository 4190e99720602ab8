#define DOCTEST_CONFIG_IMPLEMENT
#include "support/gpu.hpp"

#include <cstdio>
#include <cstdlib>

#include <doctest/doctest.h>

// The test programs' main. It adds two things to doctest's: a selection that holds no test is an
// error, and a run says how many of its tests were skipped for want of a GPU.

namespace {

/// Remembers how many test cases were run.
struct Counter : doctest::IReporter {
  static inline unsigned run = 0;
  static inline bool finished = false;  ///< false where doctest only listed or explained

  explicit Counter(const doctest::ContextOptions&) {}
  void test_run_end(const doctest::TestRunStats& stats) override {
    run = stats.numTestCasesPassingFilters;
    finished = true;
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
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
DOCTEST_REGISTER_LISTENER("counter", 1, Counter);

constexpr int exit_skipped = 77;  // ctest's SKIP_RETURN_CODE in cmake/GdnflowTest.cmake

}  // namespace

int main(int argc, char** argv) {
  const int status = doctest::Context(argc, argv).run();
  if (!Counter::finished || status != 0) return status;
  if (Counter::run == 0) {
    std::fputs("no test case matches the selection\n", stderr);
    return EXIT_FAILURE;
  }
  const auto skipped = static_cast<unsigned>(gdnflow::test::skipped_gpu_tests);
  if (skipped > 0) {
    std::printf("no CUDA device: %u of %u test cases skipped\n", skipped, Counter::run);
  }
  return skipped == Counter::run ? exit_skipped : status;
}
