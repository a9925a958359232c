"""Tuning on a GPU: what only a GPU can show to be wrong is denied, the process and the results so far survive it.

python -m pytest tests/gpu/test_tuning_gpu.py -n 0
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import kernel_registry
from ejkernel_eqx.tuning import measure, Status, tune_problem
from tests.gpu.planted import Double, Planted

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPTIONS = ejx.TuneOptions(samples=3, sample_ms=5, progress=False)

# The parent takes three quarters of the device's memory, as JAX does where nobody says otherwise.
BESIDE = """
import os
os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
import jax, jax.numpy as jnp
import ejkernel_eqx as ejx
x = jnp.ones((2, 256, 4, 64), jnp.bfloat16)
attention = ejx.FlashAttention(causal=True, platform="triton")
options = ejx.TuneOptions(max_candidates=2, samples=2, sample_ms=2, progress=False, isolate=True)
tuned = ejx.tune(attention, x, x, x, options=options)
choice = ejx.explain(tuned, x, x, x).choices[0]
print("tier", choice.tier, dict(choice.ms))
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path))


def test_what_a_gpu_shows_to_be_wrong_is_denied():
    x = jnp.ones((64, 4096), jnp.float32)
    kernel = Double(platform="triton")
    with ejx.recording() as calls:
        jax.eval_shape(kernel, x)
    result = tune_problem(calls[0].problem, calls[0].implementation, options=OPTIONS)
    assert result.config == Planted(1024, "")
    reasons = {m.config.fault: m.reason for m in result.measurements if m.status is Status.DENIED}
    assert set(reasons) == {"zeros", "outside", "drifts"}
    assert "error" in reasons["zeros"] and "repeatable" in reasons["drifts"]
    assert "ILLEGAL_ADDRESS" in reasons["outside"].upper() or "process" in reasons["outside"]
    np.testing.assert_array_equal(ejx.replan(kernel)(x), 2 * x)  # this process can still compute
    again = tune_problem(calls[0].problem, calls[0].implementation, options=OPTIONS)
    assert again.cached and again.config == result.config


@pytest.mark.memory(45)
def test_the_search_runs_beside_a_process_that_holds_the_memory(tmp_path):
    """More than half, so that a second process cannot hold as much."""
    root = pathlib.Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_PYTHON_CLIENT")}
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.55"
    environment["EJKERNEL_EQX_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "tier autotune" in done.stdout, done.stderr[-3000:]


def test_repeated_runs_all_run():
    """Each of several runs stands in what is compiled, at a size that takes a library's kernel, and has a result of its own."""
    x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.float32)
    calls = {}
    for runs in (1, 8):
        program = jax.jit(measure.repeated(lambda x: {"y": x @ x}, runs)).lower(x).compile()
        calls[runs] = len(re.findall(r"custom-call\(| fusion\(", str(program.as_text())))
        found = program(x)  # of one run the very results, of several a list
        results = [one["y"] for one in (found if runs > 1 else [found])]
        assert len({y.unsafe_buffer_pointer() for y in results}) == runs
        assert all(bool((y == results[0]).all()) for y in results)
    assert calls[8] >= 8 * calls[1] > 0


def test_a_table_is_shipped_for_the_h200():
    if "H200" not in ejx.device_kind():
        pytest.skip("the shipped table is of another device")
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    choice = ejx.explain(ejx.FlashAttention(causal=True, platform="triton"), x, x, x).choices[0]
    assert choice.tier == "persistent" and "shipped" in choice.origin and dict(choice.ms)["forward"] > 0
    assert kernel_registry.get("flash_attention", "triton").platform == choice.platform
