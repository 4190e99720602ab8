#!/bin/sh
# resource_log.sh COMPILER ARGUMENT...
#
# Runs nvcc and moves ptxas's report on each kernel (-Xptxas=-v) from the terminal into
# OBJECT.resources beside the object file, where tests/resources.sh reads it.

object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"

log=$object.resources
"$@" 2>"$log.part"
status=$?
# Everything but the report is meant for whoever builds.
grep -v -E '^ptxas info +: (Compiling entry function|Function properties|Used [0-9]+ registers|[0-9]+ bytes gmem|Compile time)|^ +[0-9]+ bytes stack frame' \
  "$log.part" >&2
if [ $status -eq 0 ]; then mv -f "$log.part" "$log"; else rm -f "$log.part" "$log"; fi
exit $status
