#include <gdnflow/error.hpp>
#include <gdnflow/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

// Whatever the bytes are, reading them gives tensors that lie within them or an Error of the
// format. A libFuzzer target: build with -fsanitize=fuzzer,address,undefined.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const auto file = gdnflow::SafetensorsFile::parse(bytes, "input");
    unsigned sum = 0;
    for (const auto& [name, view] : file.tensors()) {
      // Touches both ends, so that the sanitizer sees a view that leaves the input.
      if (view.bytes() == 0) continue;
      const auto* first = view.as<const unsigned char>();
      sum += first[0] + first[view.bytes() - 1];
    }
    [[maybe_unused]] static volatile unsigned sink;
    sink = sum;
  } catch (const gdnflow::Error& error) {
    if (error.code() != gdnflow::ErrorCode::format) std::abort();
    if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();
  }
  return 0;
}
