#!/usr/bin/env bash
# Compiles the library for every architecture it is written for, warnings as errors, and checks what
# the compiler says of each kernel: no spills, no stack.
#
#   bash tests/compile_all.sh [--cuda]
#
# --cuda installs nvcc where it is not.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../cmake/setup.sh"
cd "$gdnflow_root"

cuda=auto
case ${1:-} in
  '') ;;
  --cuda) cuda=always ;;
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
    ;;
  *) die "expected --cuda or nothing, got '$1'" ;;
esac

gdnflow_setup_packages doctest-dev
gdnflow_setup_cuda "$cuda"
[ "$GDNFLOW_CUDA" = ON ] || die "expected nvcc of at least 13.0, found none (--cuda installs it)"

# The tests are configured for the list of objects and the report, but only the library is built.
build=build/all-architectures
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGDNFLOW_CUDA=ON -DGDNFLOW_WERROR=ON \
  -DGDNFLOW_BUILD_APPS=OFF "-DGDNFLOW_CUDA_ARCHITECTURES=80;86;89;90a;100;120"
cmake --build "$build" --parallel "$(nproc)" --target gdnflow
ctest --test-dir "$build" --output-on-failure --no-tests=error -R '^build\.'
