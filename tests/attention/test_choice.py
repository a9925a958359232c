"""What attention asks dispatch for, and that what it is answered is what runs: forward and backward, however JAX transforms the call."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.conftest import name_of, ran_by_interpreter
from tests.attention.dense import normal, quick
from tests.attention.inner import (
    AttentionArrays,
    AttentionSpec,
    Backend,
    cudnn,
    DeviceFacts,
    inputs,
    memory_cache,
    Platform,
    problem_of,
    selections_of,
    xla,
    XlaConfig,
    XlaTile,
)  # fmt: skip

XLA, INTERPRET = Platform.XLA, Platform.TRITON_INTERPRET
XLA_CONFIG = XlaConfig(XlaTile(32, 16), XlaTile(16, 48))


pytestmark = pytest.mark.usefixtures("nothing_known")


@pytest.fixture
def cut(monkeypatch):
    """The tiles by which XLA calls are cut."""
    original, seen = xla._Tiles.make, []

    def make(t, s, spec, tile):
        seen.append((tile.block_q, tile.block_k))
        return original(t, s, spec, tile)

    monkeypatch.setattr(xla._Tiles, "make", make)
    return seen


def triton_config() -> Any:
    from tests.attention import tritons

    tiles: Any = (tritons.TileConfig(*sizes, 4, 1) for sizes in ((16, 32), (32, 16), (16, 16)))
    return tritons.TritonConfig(*tiles)


def layer(module: Any, x: Any, w: Any) -> Any:
    h = jnp.tanh(x * w)
    return x + module(h, h, h)


def scanned(module: Any, x: Any) -> Any:
    """Three layers in a loop over `x [T, H, D]`."""
    body = jax.checkpoint(functools.partial(layer, module))
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, jnp.arange(1.0, 4.0))[0]


def loss(function: Any) -> Any:
    return lambda x: jnp.sum(function(x) ** 2)


def transformed(module: Any, x: Any) -> dict[str, Any]:
    """Functions of the batch `x [2, T, H, D]`, each with a gradient somewhere."""
    one = functools.partial(layer, module, w=0.5)
    return {
        "grad": jax.grad(loss(one)),
        "vmap of grad": jax.vmap(jax.grad(loss(one))),
        "grad of vmap": jax.grad(loss(jax.vmap(one))),
        "scan and remat under vmap": jax.vmap(jax.grad(loss(lambda x: scanned(module, x)))),
    }


WAYS = ("grad", "vmap of grad", "grad of vmap", "scan and remat under vmap")


def key_of(module: Any, *args: Any, **options: Any) -> str:
    (selection,) = selections_of(module, inputs(*args, **options))
    return selection.problem.key()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_triton_runs_what_the_table_says(monkeypatch, way):
    """One key for the batch and for what is mapped; each of the three kernels has the tile found for it."""
    x, config = normal(0, 2, 32, 2, 16), triton_config()
    launched = ran_by_interpreter(
        monkeypatch, lambda launch: (name_of(launch), launch.constants["BQ"], launch.constants["BK"])
    )
    untuned = ejx.FlashAttention(causal=True, platform=INTERPRET)
    memory_cache.put(INTERPRET, key_of(untuned, x, x, x), config)
    module = ejx.FlashAttention(causal=True, platform=INTERPRET)
    with ejx.recording() as calls:
        jax.block_until_ready(quick(transformed(module, x)[way])(x))
    assert set(launched) == {("forward", 16, 32), ("key_gradient", 32, 16), ("query_gradient", 16, 16)}
    assert [(call.problem.dim("B"), call.config, call.tier) for call in calls] == [(2, config, "memory")]


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_xla_runs_what_the_table_says(cut, way):
    """XLA is chosen for what one call sees, so that no mapped axis has to be merged with others."""
    x = normal(0, 2, 48, 2, 16)
    seen = x[0] if "vmap" in way else x
    memory_cache.put(XLA, key_of(ejx.FlashAttention(causal=True, platform=XLA), seen, seen, seen), XLA_CONFIG)
    module = ejx.FlashAttention(causal=True, platform=XLA)
    cut.clear()
    with ejx.recording() as calls:
        jax.eval_shape(transformed(module, x)[way], x)
    assert set(cut) == {(32, 16), (16, 48)}
    assert [(call.config, call.tier) for call in calls] == [(XLA_CONFIG, "memory")]


def test_only_what_runs_is_recorded():
    """A kernel call that `vmap` folds into a larger one was never made; one that is not mapped was."""
    pytest.importorskip("triton")
    module = ejx.FlashAttention(platform=INTERPRET)
    x = jax.ShapeDtypeStruct((4, 16, 2, 16), jnp.float32)

    def batches(function, x=x):
        with ejx.recording() as calls:
            jax.eval_shape(function, x)
        return [call.problem.dim("B") for call in calls]

    assert batches(jax.vmap(lambda x: module(x, x, x))) == [4]
    assert batches(jax.vmap(jax.jit(lambda x: scanned(module, x)))) == [4]
    assert batches(lambda x: jax.vmap(lambda x: module(x, x, x))(x) + module(x[0], x[0], x[0])[None]) == [
        4,
        1,
    ]
    shared = jnp.ones((16, 2, 16))
    assert batches(jax.vmap(lambda x: x + module(shared, shared, shared))) == [1]
    biased = jax.vmap(lambda x: module(x, x, x, bias=jnp.ones((2, 16, 16))))
    plain = jax.vmap(lambda x: module(x, x, x))
    assert batches(biased) == [4]
    for call in (plain, biased):
        assert batches(jax.grad(lambda x: jnp.sum(call(x)))) == [4]  # noqa: B023


# The key


X = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def half(*sizes: int) -> Any:
    return shape(*sizes, dtype=jnp.bfloat16)


IDS, LENGTHS = shape(2, 64, dtype=jnp.int32), shape(2, dtype=jnp.int32)
# Module options, call options, and the arrays where they differ from three times X.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "plain": ({}, {}, None),
    "causal": (dict(causal=True), {}, None),
    "window": (dict(causal=True, sliding_window=8), {}, None),
    "window to the right": (dict(sliding_window=(7, 1)), {}, None),
    "soft cap": (dict(logits_soft_cap=3.0), {}, None),
    "negative scale": (dict(softmax_scale=-1.0), {}, None),
    "dropout": (dict(dropout_rate=0.1), dict(key=jax.ShapeDtypeStruct((), jax.random.key(0).dtype)), None),
    "sinks": ({}, dict(sinks=shape(4)), None),
    "slopes": ({}, dict(alibi_slopes=shape(4)), None),
    "bias": ({}, dict(bias=shape(1, 4, 64, 64)), None),
    "bias of all heads": ({}, dict(bias=shape(64, 64)), None),
    "bias of heads": ({}, dict(bias=shape(1, 4, 1, 1)), None),
    "mask": ({}, dict(mask=shape(64, 64, dtype=bool)), None),
    "segments": ({}, dict(segment_ids=IDS), None),
    "rows": ({}, dict(kv_lengths=LENGTHS), None),
    "offset": ({}, dict(q_offset=3), None),
    "window that hides keys": (dict(causal=True), dict(q_offset=-3), None),
    "dtype": ({}, {}, [half(2, 64, 4, 16)] * 3),
    "head dim": ({}, {}, [shape(2, 64, 4, 32)] * 3),
    "value dim": ({}, {}, [X, X, shape(2, 64, 4, 32)]),
    "heads": ({}, {}, [shape(2, 64, 8, 16)] * 3),
    "key heads": ({}, {}, [X, shape(2, 64, 2, 16), shape(2, 64, 2, 16)]),
    "batch": ({}, {}, [shape(4, 64, 4, 16)] * 3),
    "length": ({}, {}, [shape(2, 65, 4, 16)] * 3),
    "keys": ({}, {}, [X, shape(2, 128, 4, 16), shape(2, 128, 4, 16)]),
}


@pytest.mark.slow
def test_whatever_kernels_depend_on_changes_the_key():
    keys = {}
    for name, (options, call, arrays) in DIFFERENT.items():
        key = key_of(ejx.FlashAttention(**options, platform="xla"), *(arrays or [X] * 3), **call)
        assert key not in keys, (name, keys.get(key))
        keys[key] = name


# Pairs of options of the module and of the call.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "wider bias": ({}, dict(bias=shape(1, 4, 64, 64)), {}, dict(bias=shape(2, 4, 64, 64))),
    "a scale": (dict(softmax_scale=0.5), {}, dict(softmax_scale=0.7), {}),
    "a cap": (dict(logits_soft_cap=5.0), {}, dict(logits_soft_cap=7.0), {}),
    "what a platform must be able to do": ({}, dict(return_lse=True), dict(deterministic=True), {}),
    "an offset": ({}, dict(q_offset=3), {}, dict(q_offset=5)),
    "masks": ({}, dict(mask=shape(64, 64, dtype=bool)), {}, dict(mask=shape(2, 1, 64, 64, dtype=bool))),
}


@pytest.mark.parametrize("name", SAME)
def test_what_kernels_do_not_depend_on_does_not(name):
    one, first, other, second = SAME[name]
    key = lambda options, call: key_of(ejx.FlashAttention(**options, platform="xla"), X, X, X, **call)
    assert key(one, first) == key(other, second)


def test_cudnn_takes_one_leading_axis_where_there_are_several_devices():
    """It merges leading axes, and a merged axis of which the second part was split is gathered."""
    one = DeviceFacts(Backend.GPU, "H200", "nvidia", "9.0", 132, 232448, cudnn=(9, 30, 0))
    several = dataclasses.replace(one, count=2)

    def reason(device, *lead):
        x: Any = jax.ShapeDtypeStruct((*lead, 16, 2, 16), jnp.bfloat16)
        problem = problem_of("flash_attention", AttentionArrays(x, x, x), AttentionSpec(0.25))
        return cudnn.unsupported(problem, device)

    assert reason(one, 2, 4) is None and reason(several, 4) is None and reason(several, 1, 4) is None
    assert "several leading axes" in (reason(several, 2, 4) or "")
