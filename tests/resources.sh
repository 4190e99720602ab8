#!/usr/bin/env bash
# tests/resources.sh OBJECT-LIST
#
# Prints what each kernel takes (registers, static shared memory, stack and spills), as ptxas said
# when the objects of the list were compiled, and fails if a kernel spills, uses a stack, or has its
# matrix instructions serialised. Kernels of CUB and Thrust are counted but not judged.
set -euo pipefail

logs=()
while IFS= read -r object; do
  [ -e "$object.resources" ] || { echo "expected $object.resources, found none: build first" >&2; exit 2; }
  logs+=("$object.resources")
done <"$1"
[ ${#logs[@]} -gt 0 ] || { echo "expected CUDA objects in $1, found none" >&2; exit 2; }

awk '
  /^ptxas info +: Compiling entry function/ {
    split($0, quoted, "\047"); kernel = quoted[2]; arch = quoted[4]; next
  }
  /bytes stack frame/ { stack = $1; stores = $5; loads = $9; next }
  /^ptxas info +: Used [0-9]+ registers/ {
    shared = 0
    if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART) + 0
    match($0, /Used [0-9]+/)
    printf "%s\t%d\t%d\t%d\t%d\t%s\n", arch, substr($0, RSTART + 5, RLENGTH - 5), shared, stack, stores + loads, kernel
    next
  }
  /C7510|C7511|C7512|C7513|C7514/ { printf "serialised\t0\t0\t0\t0\t%s\n", $0 }
' "${logs[@]}" | c++filt | sort -t "$(printf '\t')" -k6,6 -k1,1 | awk -F '\t' '
  BEGIN { printf "%-9s %9s %11s %8s %8s  %s\n", "arch", "registers", "smem bytes", "stack", "spills", "kernel" }
  $1 == "serialised" { print $6; bad = 1; next }
  {
    if ($6 ~ /^(void )?(cub|thrust)::/) { libraries++; next }
    kernels++
    if ($4 > 0 || $5 > 0) bad++
    # The name without what repeats on each line: namespaces of the project, and parameters.
    name = $6
    gsub(/gdnflow::|stages::|\(anonymous namespace\)::|^void /, "", name)
    sub(/\(.*/, "", name)
    printf "%-9s %9d %11d %8d %8d  %s\n", $1, $2, $3, $4, $5, name
  }
  END {
    if (kernels == 0) { print "expected kernels of gdnflow in the report, found none"; exit 1 }
    if (bad) { printf "%d of %d kernels use a stack, spill or serialise\n", bad, kernels; exit 1 }
    printf "%d kernels, none uses a stack or spills; %d of CUB and Thrust not judged\n", kernels, libraries
  }'
