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

/// Runs gnuplot on the script and replaces `path` by the SVG. A refusal says that gnuplot is not
/// there. Errors: gdnflow::Error (io) where gnuplot fails or the file cannot be written.
Support write_plot(const Report& report, const std::filesystem::path& path);

}  // namespace gdnflow::apps
