#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <boost/program_options.hpp>

namespace gdnflow::apps {

namespace po = boost::program_options;

/// Exit statuses of every program.
inline constexpr int exit_success = 0;
inline constexpr int exit_wrong_result = 1;  ///< it ran, and a result is outside its tolerance
inline constexpr int exit_bad_input = 2;     ///< arguments, files or a machine that cannot serve

/// A command line that cannot be served. `what()` is one line: expected, got.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A program as data; `run_program` gives all of them the same manners.
struct Program {
  std::string_view name;      ///< "gdnflow-run"
  std::string_view summary;   ///< what it does, one or two lines
  std::string_view examples;  ///< lines of commands
  void (*describe)(po::options_description& options);
  int (*run)(const po::variables_map& arguments);
};

/// Parses the command line, serves --help and --version, runs the program, and turns every failure
/// into one line on standard error. Returns the exit status.
int run_program(const Program& program, int argc, const char* const* argv);

/// Whether the option was given or has a default.
inline bool has(const po::variables_map& arguments, const char* name) {
  return arguments.count(name) != 0;
}
inline const std::string& text(const po::variables_map& arguments, const char* name) {
  return arguments[name].as<std::string>();
}
inline bool flag(const po::variables_map& arguments, const char* name) {
  return arguments[name].as<bool>();
}

}  // namespace gdnflow::apps
