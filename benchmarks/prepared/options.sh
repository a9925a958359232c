#!/bin/bash
# options.sh: run in the repository's root on the device machine (branch joined, or main with it merged).
# $D: folder for results. About 60 to 100 s to compile and check in parallel, then below 150 s for the times. PROBLEMS=… and TIMED=… choose others.
JOB=$(cd "$(dirname "$0")" && pwd); export D=${D:-${OUT:-$JOB/out}}; mkdir -p "$D"; rm -f "$D"/checked_*.json
export XLA_PYTHON_CLIENT_PREALLOCATE=false TRITON_CACHE_DIR=/tmp/next_triton JAX_COMPILATION_CACHE_DIR=/tmp/next_jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=0 PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
P=${PROBLEMS:-causal128 short128 window128 docs1024_128 docs128 cap128 full128 causal64 short64 window64 docs1024_64 docs64 cap64 gqadocs128 odd128}
SECONDS=0; PIDS=
for p in $P; do (timeout 240 python "$JOB/options.py" check "$p" > "$D/check_$p.txt" 2>&1) & PIDS="$PIDS $!"; done
for q in $PIDS; do wait "$q"; done
echo "compiled and checked in $SECONDS s"
grep -h "WRONG\|NOT REP\|differs\|Error\|Traceback" "$D"/check_*.txt; grep -hc " ok$" "$D"/check_*.txt | paste -sd+ | sed 's/^/checks that passed: /'
timeout 240 python "$JOB/options.py" time ${TIMED:-$P} > "$D/time.txt" 2>&1; cat "$D/time.txt"; echo "all in $SECONDS s"
