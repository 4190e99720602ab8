#!/usr/bin/env bash
# From a fresh machine to a first result: installs what is missing, builds the library and the
# programs, runs a layer's prefill against its reference, and compares the pipelines.
#
#   bash apps/quickstart.sh [--cuda]
#
# --cuda builds the GPU stages even where there is no GPU to run them.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../cmake/setup.sh"
cd "$gdnflow_root"

cuda=auto
for argument in "$@"; do
  case $argument in
    --cuda) cuda=always ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
    *) die "expected --cuda, got '$argument'" ;;
  esac
done

gdnflow_setup_packages
if [ "$cuda" = always ] || gdnflow_has_gpu; then
  gdnflow_setup_cuda "$cuda"
else
  GDNFLOW_CUDA=OFF
  say "CUDA: no NVIDIA GPU, so the host pipelines alone are built (--cuda builds the GPU stages too)"
fi

# A folder of its own: a later `cmake --preset release` keeps its own choices.
build=build/quickstart
say "building the library and the programs in $build"
mkdir -p build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGDNFLOW_CUDA="$GDNFLOW_CUDA" \
  -DGDNFLOW_BUILD_TESTS=OFF >"$build.log" 2>&1 || {
  tail -n 30 "$build.log" >&2
  die "cmake failed; the whole log is $build.log"
}
cmake --build "$build" --parallel "$(nproc)"

device=host
if [ "$GDNFLOW_CUDA" = ON ] && gdnflow_has_gpu; then device=cuda; fi
say "one layer's prefill (q, k normalised, grouped heads), against its reference"
"$build/bin/gdnflow-run" --device "$device" --input tests/golden/qwen3_next_layer.safetensors
say "the pipelines on the benchmark cases"
"$build/bin/gdnflow-ablate" --device "$device"
say "done: the programs are in $build/bin, each with --help"
