export PYTHONPATH=$PWD/src:$PWD:$PYTHONPATH
export XLA_PYTHON_CLIENT_PREALLOCATE=false
(timeout 48 python3 -m pytest -q -n 7 -p no:cacheprovider tests/gpu/test_losses_gpu.py -m "gpu and not slow" --dist load --maxschedchunk 1 -x 2>&1 | tail -40) || true
timeout 80 python3 -u dev/try1.py 2>&1 || true
