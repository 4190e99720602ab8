#!/usr/bin/env bash
# The tests that need a GPU, and the measurements in docs/results. Refuses where there is no GPU.
# Nothing is downloaded: what cannot be built here is taken from --bin, or refused.
#
#   bash tests/gpu.sh [--tests] [--delays] [--sanitizer] [--bench] [--full] [--bin DIR]
#                     [--output DIR] [--commit SHA]
#
# --tests      every test program, with a missing GPU counted as a failure
# --delays     the GPU's tests again, of kernels whose roles are delayed at random, and whether every
#              kernel gives the same bits as without delays
# --sanitizer  the four tools of compute-sanitizer, on small shapes
# --bench      gdnflow-ablate on the standard cases, into OUTPUT/<gpu>.csv, and with
#              --mode batch_invariant into OUTPUT/<gpu>_batch_invariant.csv
#              (none of the four: all of them, in this order)
# --full       the long form of the tests
# --bin DIR    programs built elsewhere (the preset `portable`), in place of building here; those
#              with delays in DIR/delays, without which --delays is left out
# --output DIR default docs/results
# --commit SHA what the results say was measured; default: git's HEAD, with + where files differ
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../cmake/setup.sh"
cd "$gdnflow_root"

tests=no delays=no sanitizer=no bench=no bin= output=docs/results commit=
value() { [ $# -ge 2 ] && [ -n "$2" ] || die "expected a value after $1"; printf '%s\n' "$2"; }
while [ $# -gt 0 ]; do
  case $1 in
    --tests) tests=yes ;;
    --delays) delays=yes ;;
    --sanitizer) sanitizer=yes ;;
    --bench) bench=yes ;;
    --full) export GDNFLOW_TEST_FULL=1 ;;
    --bin) bin=$(value "$@"); shift ;;
    --output) output=$(value "$@"); shift ;;
    --commit) commit=$(value "$@"); shift ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
    *) die "expected an option (--help lists them), got '$1'" ;;
  esac
  shift
done
if [ "$tests$delays$sanitizer$bench" = nononono ]; then
  tests=yes delays=yes sanitizer=yes bench=yes
fi

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || true
[ -n "$gpu" ] || die "expected an NVIDIA GPU with its driver, found none"
[ -z "$bin" ] || [ -d "$bin" ] || die "--bin: expected a folder, got '$bin'"
mkdir -p build
started=$SECONDS
results=()

# needs NAME...: makes sure that each program is there: in $bin, or built here in $build with $options.
build=build/gpu
options=()
programs=
needs() {
  local name missing=()
  for name in "$@"; do
    [ -n "$bin" ] && [ -x "$bin/$name" ] || missing+=("$name")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    programs=$bin
    return 0
  fi
  [ -z "$bin" ] || die "--bin: expected ${missing[*]} in $bin, not found"
  local apps=OFF
  [[ " ${missing[*]} " == *" gdnflow-ablate "* ]] && apps=ON
  gdnflow_setup_cuda always
  say "building ${missing[*]}"
  if ! { cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGDNFLOW_CUDA=ON \
    -DGDNFLOW_CUDA_PTX=OFF -DGDNFLOW_PORTABLE=ON -DGDNFLOW_BUILD_APPS=$apps "${options[@]}" &&
    cmake --build "$build" --parallel "$(nproc)" --target "${missing[@]}"; } >"$build.log" 2>&1; then
    tail -n 40 "$build.log" >&2
    die "the build failed (without Boost.Program_options, give --bin); the whole log is $build.log"
  fi
  programs=$build/bin
}

# record NAME STATUS SECONDS: one line of the closing table.
failed=0
record() {
  local word=passed
  [ "$2" -eq 0 ] || { word="FAILED ($2)"; failed=$((failed + 1)); }
  results+=("$(printf '%-36s %-12s %5d s' "$1" "$word" "$3")")
}

# step NAME COMMAND...: runs it with its output in a log, whose end is shown where it fails.
step() {
  local name=$1 status=0 begin=$SECONDS log
  shift
  log=build/gpu-${name//[^A-Za-z0-9-]/-}.log
  "$@" >"$log" 2>&1 || status=$?
  if [ $status -ne 0 ]; then
    say "$name failed ($status); the end of $log:"
    tail -n 60 "$log"
  fi
  printf '%s %s %s\n' "$status" $((SECONDS - begin)) "$name" >>build/gpu-steps.txt
}

# gather: the steps that have run, into the table; they may have run side by side.
gather() {
  local status seconds name
  while read -r status seconds name; do record "$name" "$status" "$seconds"; done <build/gpu-steps.txt
  rm -f build/gpu-steps.txt
}
rm -f build/gpu-steps.txt

say "$gpu"
if [ "$tests" = yes ]; then
  areas=(gpu graph lib stages)
  [ -z "$bin" ] || [ ! -x "$bin/gdnflow-test-apps" ] || areas+=(apps)
  # The C interface is built where DLPack's header is.
  has_c_api() {
    if [ -n "$bin" ]; then
      [ -x "$bin/gdnflow-test-c-api-device" ]
    else
      printf '#include <dlpack/dlpack.h>\n' | c++ -E -x c++ - >/dev/null 2>&1
    fi
  }
  if has_c_api; then areas+=(c-api-device); fi
  needs "${areas[@]/#/gdnflow-test-}"
  export GDNFLOW_REQUIRE_GPU=1
  say "test programs: ${areas[*]}"
  # The GPU's own first and alone; the others are mostly host work and share the machine.
  step "tests gpu" "$programs/gdnflow-test-gpu"
  grep -E '^\[doctest\] (test cases|assertions)' "build/gpu-tests-gpu.log" || true
  for area in "${areas[@]:1}"; do
    step "tests $area" "$programs/gdnflow-test-$area" &
  done
  wait
  gather
fi

# same_bits PLAIN DELAYED: whether both files of checksums hold the same, and come from the two builds.
same_bits() {
  local file
  for file in "$1" "$2"; do
    [ -s "$file" ] || { echo "expected checksums in $file, found none"; return 1; }
  done
  [ "$(head -n 1 "$1")" = "roles as they come" ] || { echo "$1: expected a build without delays"; return 1; }
  [ "$(head -n 1 "$2")" = "roles delayed" ] || { echo "$2: expected a build with delays"; return 1; }
  diff <(tail -n +2 "$1") <(tail -n +2 "$2")
}

# with_delays NAME...: as `needs`, of the build with delays.
with_delays() {
  local bin=${bin:+$bin/delays} build=build/gpu-delays options=(-DGDNFLOW_DELAY_ROLES=ON)
  needs "$@"
}

if [ "$delays" = yes ] && [ -n "$bin" ] && [ ! -x "$bin/delays/gdnflow-test-gpu" ]; then
  say "no $bin/delays/gdnflow-test-gpu, so the roles of kernels are not delayed"
elif [ "$delays" = yes ]; then
  export GDNFLOW_REQUIRE_GPU=1
  needs gdnflow-test-gpu
  plain=$programs
  with_delays gdnflow-test-gpu
  say "roles delayed at random"
  sums=build/gpu-checksums
  rm -f "$sums" "$sums-delayed"
  step "bits" env GDNFLOW_CHECKSUMS="$sums" "$plain/gdnflow-test-gpu" --test-case="*the same bits each time*"
  step "tests gpu, delayed" env GDNFLOW_CHECKSUMS="$sums-delayed" \
    "$programs/gdnflow-test-gpu" --test-suite-exclude=long
  step "bits, delayed" same_bits "$sums" "$sums-delayed"
  gather
fi

if [ "$sanitizer" = yes ]; then
  command -v compute-sanitizer >/dev/null || die "expected compute-sanitizer on PATH, found none"
  needs gdnflow-ablate gdnflow-test-gpu
  say "compute-sanitizer"
  small_tests="*at lengths around*,*with slots*,*dense and on strided*"
  for tool in memcheck racecheck synccheck initcheck; do
    sanitize=(compute-sanitizer --tool "$tool" --error-exitcode 3)
    pipelines=naive,residual,fused-64,fused-128,fused-128x512,warp-specialized,register-state,one-pass,recurrent
    exclude=
    tiles=64,128
    if [ "$tool" = synccheck ]; then
      # It does not follow named barriers that a whole block takes part in: docs/sanitizer.md.
      exclude=fused-128x512
      pipelines=${pipelines/fused-128x512,/}
    elif [ "$tool" = racecheck ]; then
      # It does not follow how the warps that invert meet in whole heads: docs/sanitizer.md.
      tiles=64
    fi
    # Every pipeline on small shapes, tails and packed lengths, through the executors; the stages one
    # by one.
    step "$tool pipelines" "${sanitize[@]}" "$programs/gdnflow-ablate" --device cuda --seconds 0 \
      --pipelines "$pipelines" --case 1,129,2,4,state --lengths 0,65,1,75 --heads 1,3 \
      --sweep "one_pass:value_tile=$tiles" &
    # Long enough to be cut.
    step "$tool segments" "${sanitize[@]}" "$programs/gdnflow-ablate" --device cuda --seconds 0 \
      --pipelines register-state,one-pass --case 1,1025,1,2,state \
      --sweep "one_pass:value_tile=$tiles" &
    step "$tool stages" env GDNFLOW_TEST_EXCLUDE=$exclude "${sanitize[@]}" \
      "$programs/gdnflow-test-gpu" --test-case="$small_tests" &
    [ "$tiles" = 64,128 ] || continue
    # Where nothing fades: shares of whole heads are linked, with q and k normalised inside and
    # without.
    for norm in "" --qk-norm; do
      step "$tool links${norm:+ with norms}" "${sanitize[@]}" "$programs/gdnflow-ablate" \
        --device cuda --seconds 0 $norm --pipelines one-pass --case 1,1500,1,1,state \
        --distribution no_decay --sweep one_pass:value_tile=128 &
    done
    # q and k normalised and gates made ready inside; short sequences among long ones, so many that
    # they go token by token.
    step "$tool norms" "${sanitize[@]}" "$programs/gdnflow-ablate" --device cuda --seconds 0 \
      --qk-norm --raw-gates --pipelines one-pass,recurrent --case 1,200,1,2,state \
      --sweep one_pass:value_tile=128 &
    step "$tool short" "${sanitize[@]}" "$programs/gdnflow-ablate" --device cuda --seconds 0 \
      --pipelines one-pass --lengths 3,9,1,8,30,7,0,2,8,8,64,1,4,6,8,2,3,5,9 --heads 16,64 \
      --sweep one_pass:value_tile=128 &
  done
  # Lengths that fall or run over, in tensors that end where the batch does.
  step "memcheck lengths" compute-sanitizer --tool memcheck --error-exitcode 3 \
    "$programs/gdnflow-test-gpu" --test-case="*lengths of any kind*" &
  # All of them side by side: each keeps the machine busy for a small part of its time.
  wait
  gather
fi

if [ "$bench" = yes ]; then
  needs gdnflow-ablate
  if [ -z "$commit" ]; then
    commit=$(git rev-parse --short=12 HEAD 2>/dev/null) ||
      die "expected a git checkout or --commit SHA, found neither"
    [ -z "$(git status --porcelain --untracked-files=no)" ] || commit=$commit+
  fi
  name=$(printf '%s' "$gpu" | tr '[:upper:]' '[:lower:]' | sed 's/^nvidia //; s/[^a-z0-9]\{1,\}/_/g')
  mkdir -p "$output"
  say "measuring into $output/$name.csv"
  step "bench" "$programs/gdnflow-ablate" --device cuda --results "$output/$name.csv" \
    --commit "$commit"
  cat build/gpu-bench.log
  step "bench batch_invariant" "$programs/gdnflow-ablate" --device cuda --pipelines auto \
    --mode batch_invariant --results "$output/${name}_batch_invariant.csv" --commit "$commit"
  cat "build/gpu-bench-batch-invariant.log"
  gather
fi

[ ${#results[@]} -gt 0 ] || die "nothing was run"
say "$gpu, $((SECONDS - started)) s"
printf '%s\n' "${results[@]}"
if [ "$failed" -gt 0 ]; then
  say "$failed of ${#results[@]} failed"
  exit 1
fi
say "all ${#results[@]} passed"
