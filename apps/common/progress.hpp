#pragma once

#include <cstdio>
#include <string_view>

#include <fmt/format.h>
#include <unistd.h>

namespace gdnflow::apps {

/// One line on standard error that says how far long work is; silent where that is no terminal.
class Progress {
 public:
  explicit Progress(int total) : total_(total), shown_(::isatty(STDERR_FILENO) == 1) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  /// Begins the next piece of the work.
  void step(std::string_view what) {
    ++done_;
    if (!shown_) return;
    fmt::print(stderr, "\r\x1b[K[{}/{}] {}", done_, total_, what);
    std::fflush(stderr);
  }

  /// Takes the line away, so that other text can be written.
  void clear() {
    if (!shown_ || done_ == 0) return;
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
  }

 private:
  int total_;
  int done_ = 0;
  bool shown_;
};

}  // namespace gdnflow::apps
