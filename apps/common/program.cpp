#include "common/program.hpp"

#include <gdnflow/error.hpp>
#include <gdnflow/version.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <vector>

#include <fmt/format.h>

namespace gdnflow::apps {
namespace {

constexpr unsigned line_width = 100;

// Boost takes the value of an option with an optional value only as --option=VALUE. A value that
// stands behind it is joined to it here, so that both `--json` and `--json FILE` work.
std::vector<std::string> join_optional_values(const po::options_description& options, int argc,
                                              const char* const* argv) {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') == std::string::npos) {
      const po::option_description* option = options.find_nothrow(argument.substr(2), false);
      const bool takes_optional_value = option != nullptr &&
                                        option->semantic()->min_tokens() == 0 &&
                                        option->semantic()->max_tokens() == 1;
      const std::string_view next = i + 1 < argc ? argv[i + 1] : "--";
      if (takes_optional_value && (next == "-" || !next.starts_with('-'))) {
        argument.append("=").append(next);
        ++i;
      }
    }
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

po::variables_map parse(const po::options_description& options, int argc, const char* const* argv) {
  using po::command_line_style::allow_guessing;
  using po::command_line_style::unix_style;
  const std::vector<std::string> arguments = join_optional_values(options, argc, argv);
  const po::parsed_options parsed = po::command_line_parser(arguments)
                                        .options(options)
                                        .style(unix_style & ~allow_guessing)
                                        .allow_unregistered()
                                        .run();
  for (const po::option& option : parsed.options) {
    if (option.position_key >= 0 || option.unregistered) {
      throw UsageError(fmt::format("unknown argument '{}': expected options, see --help",
                                   option.original_tokens.front()));
    }
  }
  po::variables_map values;
  po::store(parsed, values);
  po::notify(values);
  return values;
}

void print_help(const Program& program, const po::options_description& options) {
  std::ostringstream listed;
  listed << options;
  fmt::print(
      "Usage: {} [options]\n\n{}\n\n{}\nExamples:\n{}\n\n"
      "Exit status: 0 success, 1 a result outside its tolerance, 2 bad arguments or input.\n",
      program.name, program.summary, listed.str(), program.examples);
}

int fail(const Program& program, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fflush(stdout);
  fmt::print(stderr, "{}: {}\n", program.name, message);
  return exit_bad_input;
}

}  // namespace

int run_program(const Program& program, int argc, const char* const* argv) {
  try {
    po::options_description options("Options", line_width);
    program.describe(options);
    options.add_options()("help,h", "show this text")("version", "show the version");
    const po::variables_map values = parse(options, argc, argv);
    int status = exit_success;
    if (has(values, "help")) {
      print_help(program, options);
    } else if (has(values, "version")) {
      fmt::print("{} {}\n", program.name, version());
    } else {
      status = program.run(values);
    }
    // A failed write that emptied the buffer shows in the error flag alone.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      return fail(program, "standard output: cannot be written");
    return status;
  } catch (const std::bad_alloc&) {
    return fail(program, "out of memory: expected a problem that fits this machine");
  } catch (const std::exception& error) {
    return fail(program, error.what());
  }
}

}  // namespace gdnflow::apps
