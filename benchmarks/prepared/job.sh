#!/bin/bash
# Attention's backward at head dim 64, in the tree of branch dqt. $JOB: this folder; $D: where results go. As every job: makes $JOB/ready when only times
# are left, and waits for $JOB/go; with ALONE=1 it waits for nobody. About 4 minutes, of which 1.5 time.
: ${JOB:=$(cd "$(dirname "$0")" && pwd)} ${D:=$JOB/out}; mkdir -p $D
export JOB D XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=$PWD/src:$PWD:$PYTHONPATH
rm -f $JOB/ready $JOB/go $JOB/ready.d64 $JOB/go.d64
nvidia-smi -L
(timeout 280 python -m pytest tests/gpu/test_hopper_backward_gpu.py -q -p no:cacheprovider -p no:benchmark -o addopts= --import-mode=importlib -m gpu \
  -k "(test_odd_lengths and (64 or 40)) or (test_it_repeats and 64)" > $D/pytest.txt 2>&1) & PT=$!
timeout 560 python $JOB/d64.py > $D/d64.txt 2>&1 & P=$!
while kill -0 $P 2>/dev/null && [ ! -e $JOB/ready.d64 ]; do sleep 0.3; done
wait $PT; tail -4 $D/pytest.txt
echo ready $SECONDS
if [ -z "$ALONE" ]; then touch $JOB/ready; while [ ! -e $JOB/go ]; do sleep 0.2; done; fi
touch $JOB/go.d64; wait $P; echo done $? $SECONDS; cat $D/d64.txt
