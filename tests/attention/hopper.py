"""Hopper's kernels without a Hopper: shapes of calls, what they would launch, and what the kernels are given."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.attention.inner import (
    AttentionArrays,
    AttentionSpec,
    compile_ahead,
    gluon_unavailable,
    problem_of,
    RowRanges,
)
from tests.attention.tritons import compiled as triton
from tests.compiled import DEVICES, executed, waits

HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")
TILE = triton.TileConfig(128, 128, 4, 2, 0, 132)
TRITON = triton.TileConfig(64, 64, 4, 2)
CAUSAL: dict[str, Any] = dict(right=0)


def call(
    dim: Any = 128,
    dtype: Any = "bfloat16",
    batch: Any = 2,
    queries: Any = 1000,
    keys: Any = 1000,
    heads: Any = 4,
    kv_heads: Any = 2,
    values: Any = None,
    with_: Any = (),
    **spec: Any,
) -> tuple[AttentionArrays, AttentionSpec]:
    """The shapes of a call, and its description."""

    def shape(*size: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    options: dict[str, Any] = {
        "bias": dict(bias=shape(batch, heads, queries, keys)),
        "mask": dict(mask=shape(batch, 1, queries, keys, dtype="bool")),
        "alibi": dict(alibi_slopes=shape(1, heads, dtype="float32")),
        "sinks": dict(sinks=shape(1, heads, dtype="float32")),
        "segments": dict(
            q_segments=shape(batch, queries, dtype="int32"), kv_segments=shape(batch, keys, dtype="int32")
        ),
        "rows": dict(rows=RowRanges(*[shape(1, queries, dtype="int32")] * 3)),
        "seeds": dict(seeds=shape(batch, heads, 2, dtype="uint32")),
    }
    arrays = AttentionArrays(
        shape(batch, queries, heads, dim),
        shape(batch, keys, kv_heads, dim),
        shape(batch, keys, kv_heads, values or dim),
    )
    for name in with_:
        arrays = arrays._replace(**options[name])
    return arrays, AttentionSpec(**{"scale": dim**-0.5} | spec)


def problem(*args: Any, **kwargs: Any) -> Any:
    """Of enough rows."""
    return problem_of("flash_attention", *call(*args, **{"batch": 32} | kwargs))


def configured(forward: Any = TRITON, keys: Any = TRITON) -> Any:
    return triton.TritonConfig(forward, keys, TRITON)


def _recorded(function: Any, arrays: AttentionArrays) -> list[Any]:
    found = []

    def record(launch: Any, inputs: Any) -> Any:
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    jax.eval_shape(executed(function, record), arrays)
    return found


def launches(arrays: AttentionArrays, spec: AttentionSpec, config: Any) -> list[Any]:
    """What the forward would launch; nothing is run."""
    return _recorded(lambda arrays: triton.forward(arrays, spec, config), arrays)


def gradient_launches(arrays: AttentionArrays, spec: AttentionSpec, config: Any) -> list[Any]:
    """What the backward would launch."""

    def backward(arrays: Any) -> Any:
        out = jnp.zeros((*arrays.q.shape[:3], arrays.v.shape[-1]), arrays.q.dtype)
        lse = jnp.zeros(out.shape[:3]).swapaxes(1, 2)
        return triton.backward(arrays, spec, config, out, lse, out, lse)

    return _recorded(backward, arrays)


def check_compiled(launch: Any, spills: int) -> Any:
    """Without more spills, and without products that wait for one another."""
    report = compile_ahead(launch, "sm_90")
    assert launch.is_gluon and report.fits and report.spills <= spills and report.registers <= 168, report
    assert not waits(launch)
    return report
