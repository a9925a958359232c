#!/bin/bash
# SSD on Hopper, in the tree of branch ssd. $JOB: this folder; $D: where results go. As every job: makes $JOB/ready when only times
# are left, and waits for $JOB/go; with ALONE=1 it waits for nobody. About 4 minutes, of which 1.5 time.
: ${JOB:=$(cd "$(dirname "$0")" && pwd)} ${D:=$JOB/out}; mkdir -p $D
export JOB D XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=$PWD/src:$PWD:$PYTHONPATH
rm -f $JOB/ready $JOB/go $JOB/ready.ssd $JOB/go.ssd
nvidia-smi -L
(timeout 280 python -m pytest tests/gpu/test_recurrence_gpu.py -q -p no:cacheprovider -p no:benchmark -o addopts= --import-mode=importlib -m gpu \
  -k "test_hoppers_single_pass or test_sequences_in_splits" > $D/pytest.txt 2>&1) & PT=$!
timeout 560 python $JOB/ssd.py > $D/ssd.txt 2>&1 & P=$!
while kill -0 $P 2>/dev/null && [ ! -e $JOB/ready.ssd ]; do sleep 0.3; done
wait $PT; tail -4 $D/pytest.txt
echo ready $SECONDS
if [ -z "$ALONE" ]; then touch $JOB/ready; while [ ! -e $JOB/go ]; do sleep 0.2; done; fi
touch $JOB/go.ssd; wait $P; echo done $? $SECONDS; cat $D/ssd.txt
