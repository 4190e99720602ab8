#pragma once

#include <gdnflow/error.hpp>

#include "common/report.hpp"

#include <filesystem>
#include <string>

namespace gdnflow::apps {

/// The gnuplot program that draws a report as SVG on its standard output: forward times by case,
/// pipeline and options with the floor, a panel for each state of L2 that was measured, and below
/// them the share of the floor, or where that is not known the ratio to the baseline.
std::string plot_script(const Report& report);

/// Runs gnuplot on a script and replaces `path` by what it writes on its standard output. A refusal
/// says that gnuplot is not there. Errors: gdnflow::Error (io) where gnuplot fails or the file
/// cannot be written.
Support draw(const std::string& script, const std::filesystem::path& path);
/// A single-quoted string of gnuplot, in which nothing is substituted.
std::string quoted(std::string text);

/// The report's plot, drawn.
Support write_plot(const Report& report, const std::filesystem::path& path);

}  // namespace gdnflow::apps
