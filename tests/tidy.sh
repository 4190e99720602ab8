#!/usr/bin/env bash
# clang-tidy over the host files, with .clang-tidy's checks; any finding fails.
#
#   bash tests/tidy.sh [FILE...]     default: every .cpp of lib, stages, graph and apps
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../cmake/setup.sh"
cd "$gdnflow_root"

command -v clang-tidy >/dev/null || die "expected clang-tidy (the package clang-tidy), found none"
cmake --preset host-only >/dev/null
if [ $# -eq 0 ]; then
  mapfile -t files < <(find lib stages graph apps -name '*.cpp' | sort)
  set -- "${files[@]}"
fi
# The flags are g++'s, of which clang may not know each; its counts of warnings left out are no news.
printf '%s\0' "$@" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy -p build/host-only --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option 2> >(grep -v -E '^[0-9]+ warnings? generated' >&2)
say "$# files, no findings"
