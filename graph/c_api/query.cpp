#include <gdnflow/choice.hpp>
#include <gdnflow/device.hpp>
#include <gdnflow/recipes.hpp>
#include <gdnflow/version.hpp>

#include "border.hpp"
#include "problem.hpp"
#include "tensors.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

// What there is: the version, devices, recipes and variants, and what `auto` would take.

using namespace gdnflow;
using namespace gdnflow::c_api;

extern "C" {

const char* gdnflow_version(void) { return version(); }

int32_t gdnflow_device_count(void) { return cuda_device_count(); }

gdnflow_status gdnflow_device_query(DLDevice device, gdnflow_device_info* info) {
  return guarded([&] {
    gdnflow_device_info& to = expect(info, "info");
    const DeviceInfo from = device_info(device_of(device, "device"));
    gdnflow_device_info result{};
    std::copy_n(from.name.begin(), std::min(from.name.size(), sizeof result.name - 1), result.name);
    result.capability = from.capability;
    result.multiprocessors = from.multiprocessors;
    result.driver_version = from.driver_version;
    result.runtime_version = from.runtime_version;
    result.shared_bytes_per_block = from.shared_bytes_per_block;
    result.l2_bytes = from.l2_bytes;
    result.memory_bytes = from.memory_bytes;
    to = result;
  });
}

gdnflow_status gdnflow_explain(const gdnflow_problem* problem, gdnflow_capacity capacity,
                               DLDevice device, char* text, size_t size, size_t* length) {
  return guarded([&] {
    const Problem& p = expect(problem, "problem").value;
    const Choice choice =
        choose(p, {capacity.tokens, capacity.sequences}, device_info(device_of(device, "device")));
    give_text(to_string(choice), text, size, length);
  });
}

gdnflow_status gdnflow_recipes(char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    for (const Recipe& recipe : recipes()) {
      lines += fmt::format("{}\t{}\n", recipe.id, recipe.description);
    }
    give_text(lines, text, size, length);
  });
}

gdnflow_status gdnflow_variants(char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    for (const Stage& stage : builtin_stages().stages()) {
      for (const Variant& variant : stage.variants) {
        std::string options;
        for (const OptionSpec& option : variant.options) {
          options += fmt::format("{}{}={}", options.empty() ? "" : ";", option.name,
                                 fmt::join(option.allowed, ","));
        }
        lines += fmt::format("{}\t{}\t{}\t{}\t{}\n", stage.name, variant.id,
                             to_string(variant.target), options, variant.description);
      }
    }
    give_text(lines, text, size, length);
  });
}

}  // extern "C"
