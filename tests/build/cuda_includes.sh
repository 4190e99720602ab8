#!/usr/bin/env bash
# tests/build/cuda_includes.sh BUILD NINJA
#
# fmt does not compile under nvcc, Eigen warns there and JSON costs seconds a file: none of their
# headers may be reachable from a .cu file of the library. Reads Ninja's record of dependencies.
set -euo pipefail

"$2" -C "$1" -t deps | awk '
  /^[^ ].*: #deps/ { object = $1; cuda = object ~ /^(lib|stages|graph)\/.*\.cu\.o:$/; if (cuda) count++ }
  cuda && /^ / && /\/(fmt|Eigen|nlohmann)\// { print object, $1; bad = 1 }
  END {
    if (count == 0) { print "expected CUDA objects, found none: build first"; exit 2 }
    if (!bad) print count " CUDA objects, none includes fmt, Eigen or JSON"
    exit bad
  }'
