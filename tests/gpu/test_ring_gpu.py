"""Attention over several GPUs, against the same attention on one.

python -m pytest tests/gpu/test_ring_gpu.py -n 0
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.sequences import reorder_sequence, restore_sequence
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs GPUs", allow_module_level=True)
if jax.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

pytestmark = pytest.mark.gpu
AXIS, DEVICES, T = "sequence", 2, 2048
KINDS = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "full": ({}, {}),
    "window": ({"causal": True, "sliding_window": 300}, {}),
    "dropout": ({"causal": True, "dropout_rate": 0.2}, {"key": jax.random.key(1)}),
    "lengths": ({"causal": True}, {"kv_lengths": jnp.array([700, 2000])}),
    "alibi": ({"causal": True, "logits_soft_cap": 20.0}, {"alibi_slopes": jnp.linspace(0.01, 0.2, 8)}),
}


def results(module: Any, arrays: list[jax.Array], options: dict[str, Any]) -> list[np.ndarray]:
    """Output and gradients."""

    @jax.jit
    def both(q, k, v, dout):
        out, pull = jax.vjp(lambda *qkv: module(*qkv, **options), q, k, v)
        return out, *pull(dout)

    return jax.device_get(both(*arrays))


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_are_as_one(name, kind, order, method):
    module_options, options = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (2, T, heads, 64), jnp.bfloat16)
        for key, heads in zip(keys, (8, 4, 4, 8), strict=True)
    ]
    one = results(ejx.FlashAttention(**module_options, platform="triton"), arrays, options)
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(KINDS[kind],), devices=jax.devices()[:DEVICES])
    stored = (lambda x: reorder_sequence(x, DEVICES, axis=1)) if order == "zigzag" else (lambda x: x)
    in_time = (lambda x: restore_sequence(x, DEVICES, axis=1)) if order == "zigzag" else (lambda x: x)
    split = [jax.device_put(stored(x), NamedSharding(mesh, P(None, AXIS))) for x in arrays]
    ring = ejx.RingAttention(AXIS, **module_options, order=order, method=method, platform="triton")
    for n, (x, y) in enumerate(zip(results(ring, split, options), one, strict=True)):
        kind_of = "gradient" if n else "forward"
        assert_close(np.asarray(in_time(x)), y, "bfloat16", kind_of, name=f"{kind_of} {n}")


def test_the_hops_are_issued_before_the_kernels():
    """In the order of the compiled program, a hop begins before a kernel and ends after it."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,), devices=jax.devices()[:DEVICES])
    x = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, AXIS)))
    ring = ejx.RingAttention(AXIS, causal=True, order="zigzag", method="ring", platform="triton")
    text = jax.jit(lambda x: ring(x, x, x)).lower(x).compile().as_text() or ""
    entry = text[text.index("ENTRY") :].splitlines()
    begins = [n for n, line in enumerate(entry) if " collective-permute-start(" in line]
    ends = [n for n, line in enumerate(entry) if " collective-permute-done(" in line]
    kernels = [n for n, line in enumerate(entry) if " custom-call(" in line or " conditional(" in line]
    assert begins and ends
    assert any(min(begins) < n < max(ends) for n in kernels)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_two_runs_are_equal_bit_by_bit(order):
    mesh = jax.make_mesh((DEVICES,), (AXIS,), devices=jax.devices()[:DEVICES])
    put = lambda seed: jax.device_put(
        jax.random.normal(jax.random.key(seed), (1, T, 8, 64), jnp.bfloat16),
        NamedSharding(mesh, P(None, AXIS)),
    )
    arrays = [put(seed) for seed in range(4)]
    ring = ejx.RingAttention(AXIS, causal=True, order=order, method="ring", platform="triton")
    for x, y in zip(results(ring, arrays, {}), results(ring, arrays, {}), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
