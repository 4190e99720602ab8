#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

/// Runs the programs as a person does and keeps what they print.
namespace gdnflow::test {

namespace fs = std::filesystem;

/// A folder of this test's own, removed at its end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "gdnflow-apps-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  /// Files in the folder.
  int count() const {
    return static_cast<int>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string golden(const std::string& name) {
  return std::string(GDNFLOW_TEST_DATA) + "/golden/" + name + ".safetensors";
}

struct Outcome {
  int status = -1;
  std::string out;
  std::string err;

  /// Lines on standard error.
  long error_lines() const { return std::count(err.begin(), err.end(), '\n'); }
};

/// Runs gdnflow-NAME. `path` replaces PATH where it is given.
inline Outcome run(const std::string& name, std::vector<std::string> arguments,
                   const char* path = nullptr) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  const std::string err = folder / "err";
  std::string program = std::string(GDNFLOW_BIN_DIR) + "/gdnflow-" + name;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);
  std::vector<char*> argv{program.data()};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  std::string replaced = std::string("PATH=") + (path != nullptr ? path : "");
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (path == nullptr || std::string(*variable).rfind("PATH=", 0) != 0) {
      environment.push_back(*variable);
    }
  }
  if (path != nullptr) environment.push_back(replaced.data());
  environment.push_back(nullptr);

  pid_t child = 0;
  const int error =
      posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot run " + program);
  int status = 0;
  waitpid(child, &status, 0);
  Outcome outcome;
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.out = read_text(out);
  outcome.err = read_text(err);
  return outcome;
}

}  // namespace gdnflow::test
