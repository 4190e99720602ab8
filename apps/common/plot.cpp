#include "common/plot.hpp"

#include "common/output.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace gdnflow::apps {
namespace {

namespace fs = std::filesystem;

// A field of a data block: quoted, so without quotes and line breaks of its own.
std::string field(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '"' || c == '\\' || c == '\n'; }, ' ');
  return fmt::format("\"{}\"", text);
}

// A data block with a column a pipeline with its options and one more value a case in the last
// column.
std::string data_block(
    const Report& report, std::string_view name, std::string_view last_column,
    const std::function<std::string(const CaseResult&, const PipelineResult&)>& cell) {
  const std::vector<std::string> labels = report.labels();
  std::string text = fmt::format("${} << EOD\n\"case\"", name);
  for (const std::string& label : labels) text += " " + field(label);
  text += fmt::format(" \"{}\"\n", last_column);
  for (const CaseResult& result : report.cases) {
    text += field(result.measured.name);
    for (const std::string& label : labels) {
      const PipelineResult* pipeline = result.find(label);
      text += " " + (pipeline != nullptr ? cell(result, *pipeline) : "?");
    }
    text += result.floor_ms > 0 ? fmt::format(" {:.6g}\n", result.floor_ms) : " ?\n";
  }
  return text + "EOD\n";
}

int run_gnuplot(const fs::path& script, const fs::path& svg) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, svg.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::string program = "gnuplot";
  std::string argument = script.string();
  char* arguments[] = {program.data(), argument.data(), nullptr};
  pid_t child = 0;
  const int error = posix_spawnp(&child, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return -error;
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return -errno;
  }
  return status;
}

}  // namespace

std::string quoted(std::string text) {
  for (std::size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 2) {
    text.insert(at, 1, '\'');
  }
  return fmt::format("'{}'", text);
}

std::string plot_script(const Report& report) {
  const std::size_t series = report.labels().size();
  const bool has_floor = report.bytes_per_second > 0;
  const std::string baseline = report.baseline;
  const auto times_block = [&](std::string_view name, std::optional<Times> PipelineResult::*times) {
    return data_block(report, name, "floor",
                      [&](const CaseResult&, const PipelineResult& pipeline) -> std::string {
                        const std::optional<Times>& measured = pipeline.*times;
                        return measured ? fmt::format("{:.6g}", measured->forward_ms) : "?";
                      });
  };
  // One panel for each state of L2 that was measured, and one for what it comes to.
  struct Panel {
    std::string_view block;
    std::string_view title;
  };
  std::vector<Panel> panels;
  std::string script;
  if (report.has_hot()) {
    script += times_block("hot", &PipelineResult::hot);
    panels.push_back({"hot", "forward, ms"});
  }
  if (report.has_cold()) {
    script += times_block("cold", &PipelineResult::cold);
    panels.push_back({"cold", "forward with a cold L2, ms"});
  }
  script += data_block(
      report, "shares", "floor",
      [&](const CaseResult& result, const PipelineResult& pipeline) -> std::string {
        if (has_floor) {
          return fmt::format("{:.6g}", 100 * result.floor_ms / pipeline.times().forward_ms);
        }
        const auto ratio = ratio_to_baseline(report, result, pipeline);
        return ratio ? fmt::format("{:.6g}", *ratio) : "?";
      });
  constexpr std::size_t least_width = 900;
  constexpr std::size_t most_width = 12000;
  constexpr std::size_t panel_height = 400;
  const std::size_t width =
      std::clamp(200 + report.cases.size() * (30 + 22 * series), least_width, most_width);
  const std::size_t last_column = series + 2;
  std::string title = report.device_text;
  if (!report.limit.empty()) title += ", " + report.limit;
  script += fmt::format(
      "set terminal svg size {},{} noenhanced background rgb 'white'\n"
      "set datafile missing '?'\n"
      "set style data histograms\n"
      "set style histogram clustered gap 1\n"
      "set style fill solid 0.85 noborder\n"
      "set xtics rotate by -25 scale 0\n"
      "set grid ytics\n"
      "set key outside right top\n"
      "set multiplot layout {},1 title {}\n"
      "set logscale y\n",
      width, panel_height * (panels.size() + 1), panels.size() + 1, quoted(title));
  for (const Panel& panel : panels) {
    script += fmt::format(
        "set ylabel {}\n"
        "plot for [i=2:{}] ${} using i:xtic(1) title columnheader(i)",
        quoted(std::string(panel.title)), last_column - 1, panel.block);
    if (has_floor) {
      script += fmt::format(
          ", ${} using 0:{} with points pointtype 7 pointsize 0.6 linecolor 'black' title 'floor'",
          panel.block, last_column);
    }
    script += '\n';
  }
  script += fmt::format(
      "unset logscale y\n"
      "set yrange [0:*]\n"
      "set ylabel {}\n"
      "plot for [i=2:{}] $shares using i:xtic(1) title columnheader(i)\n"
      "unset multiplot\n",
      quoted(has_floor ? "share of the floor, %" : "times as fast as " + baseline),
      last_column - 1);
  return script;
}

Support draw(const std::string& text, const fs::path& path) {
  const fs::path target = behind_links(path);
  const fs::path svg = temporary_beside(target);
  fs::path script = svg;
  script += ".gnuplot";
  write_file(script, text);
  const int status = run_gnuplot(script, svg);
  std::error_code ignored;
  fs::remove(script, ignored);
  if (status == 0) {
    fs::rename(svg, target);
    return Support::yes();
  }
  fs::remove(svg, ignored);
  const bool missing =
      status == -ENOENT || (status > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 127);
  if (missing) return Support::no("gnuplot was not found on PATH");
  throw Error(ErrorCode::io, fmt::format("{}: cannot be drawn: gnuplot {}", path.string(),
                                         status < 0 ? std::strerror(-status)
                                                    : fmt::format("ended with status {}", status)));
}

Support write_plot(const Report& report, const fs::path& path) {
  return draw(plot_script(report), path);
}

}  // namespace gdnflow::apps
