#!/usr/bin/env bash
# Everything that can be tested on this machine, from a fresh one on: set-up, warnings as errors, the
# tests, the kernels compiled for sm_80 and sm_90a where nvcc is, and the host code under sanitizers.
#
#   bash tests/run.sh [--quick] [--cuda]
#
# --quick  the first build and its tests alone: no sanitizers, no fuzzing, no second build
# --cuda   installs nvcc where it is not, even without a GPU
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../cmake/setup.sh"
cd "$gdnflow_root"

quick=no
cuda=auto
for argument in "$@"; do
  case $argument in
    --quick) quick=yes ;;
    --cuda) cuda=always ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
    *) die "expected --quick or --cuda, got '$argument'" ;;
  esac
done

gdnflow_setup_packages doctest-dev
gdnflow_setup_cuda "$cuda"
jobs=$(nproc)
started=$SECONDS

# build PRESET [CMAKE-ARGUMENT...] [--target TARGET...]: configures and builds, all or the targets; the
# log is shown where it fails.
build() {
  local preset=$1 arguments=()
  shift
  while [ $# -gt 0 ] && [ "$1" != --target ]; do
    arguments+=("$1")
    shift
  done
  say "building $preset ($((SECONDS - started)) s so far)"
  mkdir -p build
  cmake --preset "$preset" -DGDNFLOW_WERROR=ON "${arguments[@]}" >"build/$preset.log" 2>&1 || {
    tail -n 30 "build/$preset.log" >&2
    die "cmake failed; the whole log is build/$preset.log"
  }
  cmake --build --preset "$preset" --parallel "$jobs" "$@" >>"build/$preset.log" 2>&1 || {
    grep -E -A 12 'FAILED:|error:' "build/$preset.log" | tail -n 60 >&2
    die "the build failed; the whole log is build/$preset.log"
  }
}

# Host-only builds have this CUDA-free preset; the first build has the GPU stages where nvcc is.
main=host-only
if [ "$GDNFLOW_CUDA" = ON ]; then
  main=release
  build release -DGDNFLOW_CUDA=ON "-DGDNFLOW_CUDA_ARCHITECTURES=80;90a"
else
  build host-only
fi

if [ "$quick" = no ]; then
  # For its warnings: all programs and tests of this configuration are built under the sanitizers below.
  [ "$main" = host-only ] || build host-only --target gdnflow gdnflow-run

  # Under sanitizers g++ warns of uninitialised memory inside its own standard library.
  build sanitize -DGDNFLOW_WERROR=OFF
  say "tests under AddressSanitizer and UndefinedBehaviorSanitizer ($((SECONDS - started)) s so far)"
  ctest --preset sanitize --parallel "$jobs"

  # Without OpenMP no test of a stage has a second thread.
  build thread-sanitize -DGDNFLOW_WERROR=OFF --target gdnflow-test-lib gdnflow-test-graph
  say "tests under ThreadSanitizer ($((SECONDS - started)) s so far)"
  ctest --preset thread-sanitize --label-regex '^(lib|graph)$' --parallel "$jobs"

  if gdnflow_has_libfuzzer; then
    build fuzz
    say "fuzzing for a short while ($((SECONDS - started)) s so far)"
    ctest --preset fuzz --parallel "$jobs"
  else
    say "clang++ with libFuzzer is not here, so nothing is fuzzed"
  fi
fi

# Last, so that the closing line is that of the full set of tests.
say "tests of $main ($((SECONDS - started)) s so far)"
ctest --preset "$main" --parallel "$jobs"
