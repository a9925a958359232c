"""Attention on a GPU: the Triton kernels and cuDNN against the float64 reference, and what only a GPU can show.

    python -m pytest tests/gpu -n 8 --dist load --maxschedchunk 1

Eight processes share one device: `conftest.py` keeps each from holding more memory than it needs, and runs one test at a time of those that
say how much they need (`memory`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionGrads, AttentionSpec
from ejkernel_eqx.attention.triton.hopper import backward_tiles, tile_sizes
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.attention.cases import Case, CASES, EVERYTHING, make, poison
from tests.attention.kernels import (
    assert_gradient_close,
    cotangents,
    DIFFERENTIABLE,
    Result,
    run_reference,
)
from tests.gpu.host import on_host
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION = ejx.FlashAttention.operation
NEEDS = OPERATION
TRITON = kernel_registry.get(OPERATION, "triton")
REPEATS = 5


@functools.partial(jax.jit, static_argnums=(3, 4))
def run_triton(arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec, config: Any) -> Result:
    kernels = TRITON.load()
    out, lse = kernels.forward(arrays, spec, config)
    return Result(out, lse, kernels.backward(arrays, spec, config, out, lse, dout, dlse))


def default_config(arrays: AttentionArrays, spec: AttentionSpec) -> Any:
    return TRITON.load().default_config(problem_of(OPERATION, arrays, spec), device_facts())


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_agrees(case: Case, arrays: AttentionArrays, dout: Array, dlse: Array, actual: Result) -> None:
    expected = on_host(run_reference, arrays, dout, dlse, case.spec)
    assert_close(actual.out, expected.out, case.dtype, "forward", name="out")
    if actual.lse is not None:
        assert_close(actual.lse, expected.lse, case.dtype, "forward", name="lse")
    through_delta = on_host(uncertain_parts, arrays, dout, expected, case.spec)
    for name in DIFFERENTIABLE:
        gradient, array = getattr(actual.grads, name), getattr(arrays, name)
        if array is None:
            assert gradient is None
            continue
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        part = getattr(through_delta, name, None)
        assert_gradient_close(
            gradient, getattr(expected.grads, name), part, case.dtype, f"gradient of {name}"
        )


def uncertain_parts(arrays: AttentionArrays, dout: Array, expected: Result, spec: AttentionSpec):
    """By what to measure the gradients of a 16-bit problem: as `cancelling_part`, for gradients that are sums too.

    A backward is given `out` rounded to 16 bits, so `delta = rowsum(dout * out)` is off by a random amount in every
    query. Its share of a gradient is as uncertain as that; where a gradient is a sum over queries, so is the root
    of the sum of the squared shares (the signed sum may vanish, the uncertainty does not).
    """
    if arrays.q.dtype.itemsize != 2:
        return None
    delta = (np.asarray(dout, np.float64) * expected.out).sum(-1).swapaxes(1, 2)
    batch, heads, queries, keys = *delta.shape, arrays.k.shape[1]
    bias = jnp.zeros((1, 1, 1, 1), arrays.q.dtype) if arrays.bias is None else arrays.bias
    full = arrays._replace(bias=jnp.broadcast_to(bias, (batch, heads, queries, keys)))
    parts = run_reference(full, jnp.zeros_like(dout), jnp.asarray(delta, jnp.float32), spec).grads
    shares = {}
    if arrays.bias is not None:
        # Along the keys of one query the error is one and the same.
        summed = parts.bias.sum(-1, keepdims=True) if arrays.bias.shape[-1] != keys else parts.bias
        shares["bias"] = _root_sum(summed, arrays.bias.shape)
    if arrays.alibi_slopes is not None:
        own = (
            np.arange(queries) + spec.offset
            if arrays.rows is None
            else np.asarray(arrays.rows.position)[:, None]
        )
        distance = np.arange(keys) - own[..., None]
        shares["alibi_slopes"] = _root_sum((parts.bias * distance).sum(-1), (*arrays.alibi_slopes.shape, 1))[
            ..., 0
        ]
    if arrays.sinks is not None:
        weight = np.exp(np.asarray(arrays.sinks, np.float64)[..., None] - expected.lse)
        shares["sinks"] = _root_sum(weight * delta, (*arrays.sinks.shape, 1))[..., 0]
    return AttentionGrads(parts.q, parts.k, parts.v, **shares)


def _root_sum(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axes = tuple(i for i, (size, wanted) in enumerate(zip(x.shape, shape, strict=True)) if size != wanted)
    return np.sqrt((x**2).sum(axes, keepdims=True))


def _without_dtype(case: Case) -> str:
    return case.name.replace(f"-{case.dtype}", "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n", range(len(CASES)), ids=[_without_dtype(case) for case in CASES])
def test_triton(n, dtype):
    """Output, log-sum-exp and all gradients; the same bit for bit when run again, and with NaN in what is hidden."""
    case = dataclasses.replace(CASES[n], dtype=dtype)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    run = functools.partial(run_triton, spec=spec, config=default_config(arrays, spec))
    actual = run(arrays, dout, dlse)
    assert actual.out.dtype == arrays.q.dtype and actual.lse.dtype == jnp.float32
    assert_agrees(case, arrays, dout, dlse, actual)
    assert_same(actual, run(poison(case, arrays), dout, dlse))
    for _ in range(REPEATS - 1):
        assert_same(actual, run(arrays, dout, dlse))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", range(len(CASES)), ids=[_without_dtype(case) for case in CASES])
def test_every_tile_of_hopper(n, dtype, monkeypatch):
    """The forward, also of few queries, and with so few programs that each has several tiles; NaN in what is hidden."""
    monkeypatch.setattr(tile_sizes, "LEAST_QUERIES", 1)
    case = dataclasses.replace(CASES[n], dtype=dtype)
    arrays, spec = make(case)
    problem, kernels = problem_of(OPERATION, arrays, spec), TRITON.load()
    if (reason := tile_sizes.unfit(problem, device_facts())) is not None:
        pytest.skip(f"Hopper's kernel {reason}")
    configs = [c for c in kernels.candidates(problem, device_facts()) if c.forward.hopper_programs]
    few = dataclasses.replace(configs[0].forward, hopper_programs=3)
    expected = on_host(run_reference, arrays, *cotangents(case), spec)
    for config in (dataclasses.replace(configs[0], forward=few), *configs):
        run = jax.jit(functools.partial(kernels.forward, spec=spec, config=config))
        actual = run(arrays)
        assert_close(actual[0], expected.out, dtype, "forward", name="out")
        assert_close(actual[1], expected.lse, dtype, "forward", name="lse")
        assert_same(actual, run(poison(case, arrays)))


# Lengths that no tile divides, several tiles of queries; every padded head dim and every option that Hopper's kernel takes.
_LONG: dict[str, Any] = dict(T=397, S=525, offset=128)
_HOPPER = [
    *(Case(name=f"heads-of-{dim}", D=dim, V=dim, right=0, **_LONG) for dim in (40, 64, 80, 96, 112, 128, 160, 256)),
    Case(name="full", T=512, S=640, D=128, V=128),
    Case(name="full-odd", T=513, S=333, D=64, V=64, H=6, K=1),
    Case(name="values-of-another-dim", T=300, S=300, D=96, V=128, right=0),
    Case(name="window", D=128, V=128, left=99, right=0, **_LONG),
    Case(name="window-on-both-sides", D=64, V=64, left=140, right=60, **_LONG),
    Case(name="window-that-misses-keys", T=400, S=700, D=128, V=128, left=20, right=0),
    Case(name="more-queries", T=700, S=257, D=128, V=128, right=0, offset=257 - 700),
    Case(name="soft-cap", D=128, V=128, right=0, soft_cap=15.0, **_LONG),
    Case(name="sinks", D=64, V=64, right=0, sinks="BH", **_LONG),
    Case(name="sinks-of-blind-rows", B=3, T=300, S=300, D=128, V=128, rows="lengths", sinks="1H"),
    Case(name="lengths", B=3, T=385, S=430, D=64, V=64, rows="lengths"),
    Case(name="lengths-of-256", B=3, T=300, S=300, D=256, V=256, rows="lengths"),
    Case(name="packed", T=700, S=700, D=128, V=128, rows="packed"),
    Case(name="scattered", T=333, S=444, D=128, V=128, rows="scattered"),
    Case(name="segments", T=500, S=500, D=64, V=64, segments=True, right=0),
    Case(name="segments-and-all", T=500, S=500, D=128, V=128, segments=True, left=200, right=0, soft_cap=20.0, sinks="1H"),
    Case(name="many-rows", B=16, T=257, S=257, H=16, K=4, D=128, V=128, right=0),
    Case(name="soft-cap-of-blind-rows", B=3, T=300, S=300, D=128, V=128, rows="lengths", soft_cap=50.0),
    Case(name="segments-of-256", T=500, S=500, D=256, V=256, segments=True, right=0),
    Case(name="segments-in-a-window", T=900, S=900, D=128, V=128, segments=True, left=300, right=0),
    Case(name="soft-cap-of-64", D=64, V=64, right=0, soft_cap=30.0, **_LONG),
    # Keys in two parts, and values in two.
    Case(name="keys-of-192", D=192, V=128, right=0, **_LONG),
    Case(name="keys-of-144", T=300, S=300, D=144, V=104, H=6, K=2),
    Case(name="segments-of-192", B=2, T=500, S=500, D=192, V=128, segments=True, left=300, right=0, sinks="1H"),
    Case(name="heads-of-512", D=512, V=512, right=0, **_LONG),
    Case(name="heads-of-320", T=300, S=300, D=320, V=264, H=6, K=2, rows="packed"),
]  # fmt: skip


def _on_hopper(arrays: AttentionArrays, spec: AttentionSpec) -> Any:
    """The default configuration of calls with more rows: its forward is Hopper's."""
    problem = problem_of(OPERATION, arrays, spec)
    if (reason := tile_sizes.unfit(problem, device_facts())) is not None:
        pytest.skip(f"Hopper's kernel {reason}")
    config = default_config(arrays, spec)
    if config.forward.hopper_programs:
        return config
    # So few tiles are Triton's by default; the kernel is the same.
    first = next(c for c in TRITON.load().candidates(problem, device_facts()) if c.forward.hopper_programs)
    return dataclasses.replace(config, forward=first.forward)


@pytest.mark.parametrize("n", range(len(_HOPPER)), ids=[case.name for case in _HOPPER])
def test_the_default_on_hopper(n):
    """As `test_triton`, at lengths at which the forward is Hopper's; gradients of some."""
    case = dataclasses.replace(_HOPPER[n], dtype="float16" if n % 3 == 1 else "bfloat16")
    arrays, spec = make(case)
    config, (dout, dlse) = _on_hopper(arrays, spec), cotangents(case)
    poisoned = poison(case, arrays)
    if case.name in (
        "window",
        "lengths",
        "segments",
        "sinks-of-blind-rows",
        "heads-of-160",
        "keys-of-192",
        "heads-of-512",
    ):
        run = functools.partial(run_triton, spec=spec, config=config)
        actual = run(arrays, dout, dlse)
        assert_agrees(case, arrays, dout, dlse, actual)
        assert_same(actual, run(poisoned, dout, dlse))
    else:
        run = jax.jit(functools.partial(TRITON.load().forward, spec=spec, config=config))
        actual = run(arrays)
        expected = on_host(reference.attend, _wide(arrays), spec)
        for name, x, exact in zip(("out", "lse"), actual, expected, strict=True):
            assert_close(x, exact, case.dtype, "forward", name=name)
        for _ in range(REPEATS):
            assert_same(actual, run(poisoned))


def test_keys_that_ids_and_a_window_hide_only_together():
    """The first keys have the id of the last queries, from which the window keeps them. NaN there reaches nothing."""
    case = Case(T=640, S=640, D=128, V=128, left=100, right=0, segments=True, dtype="bfloat16")
    arrays, spec = make(case)
    token = jnp.broadcast_to(jnp.arange(640, dtype=jnp.int32), (case.B, 640))
    arrays = arrays._replace(q_segments=token // 160, kv_segments=jnp.where(token < 100, 3, token // 160))
    hidden = ~reference.visibility(arrays, spec).any((1, 2))[..., None, None]
    assert hidden[:, :100].all() and not hidden[:, 100:].any()
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (arrays.k, arrays.v))
    config, (dout, dlse) = _on_hopper(arrays, spec), cotangents(case)
    actual = run_triton(arrays._replace(k=k, v=v), dout, dlse, spec, config)
    assert_agrees(case, arrays, dout, dlse, actual)


@pytest.mark.parametrize("n", range(len(_HOPPER)), ids=[case.name for case in _HOPPER])
def test_every_tile_of_hoppers_backward(n):
    """As `test_triton`; the default of longer calls."""
    case = dataclasses.replace(_HOPPER[n], dtype="float16" if n % 3 == 1 else "bfloat16")
    arrays, spec = make(case)
    problem, (dout, dlse) = problem_of(OPERATION, arrays, spec), cotangents(case)
    configs = [c for c in TRITON.load().candidates(problem, device_facts()) if c.key_gradient.hopper_programs]
    if not configs:
        pytest.skip(
            f"Hopper's backward {backward_tiles.unfit(problem, device_facts()) or 'has no tile for it'}"
        )
    for config in configs:
        run = functools.partial(run_triton, spec=spec, config=config)
        actual = run(arrays, dout, dlse)
        assert_agrees(case, arrays, dout, dlse, actual)
        assert_same(actual, run(poison(case, arrays), dout, dlse))


def _wide(arrays: AttentionArrays) -> AttentionArrays:
    """In float32 on the host, for results alone."""
    host = jax.device_put(arrays, jax.devices("cpu")[0])
    return host._replace(**{name: getattr(host, name).astype(jnp.float32) for name in "qkv"})


@pytest.mark.parametrize("packed", [False, True])
def test_hopper_under_transformations(packed):
    """The public call, mapped, in a scan over layers and differentiated: one launch of the kernel that runs without them. Layers
    share the bounds of packed documents, but not the counter of their tiles."""
    case = Case(B=12, T=513, S=513, H=16, K=4, D=128, V=128, right=0, dtype="bfloat16")
    arrays, spec = make(case)
    _on_hopper(arrays, spec)
    operation = ejx.FlashAttention(causal=True, platform="triton")
    q, k, v = arrays[:3]
    ids = jnp.arange(q.shape[1]) // 100

    def attention(q: Array, k: Array, v: Array) -> Array:
        own: Any = {"segment_ids": jnp.broadcast_to(ids, q.shape[:-2])} if packed else {}
        return operation(q, k, v, **own)

    assert "hopper_programs=132" in str(ejx.explain(operation, q, k, v))
    together = jax.jit(attention)(q, k, v)
    split = [x.reshape(4, 3, *x.shape[1:]) for x in (q, k, v)]
    assert_same(together, jax.jit(jax.vmap(jax.vmap(attention)))(*split).reshape(together.shape))

    def layers(q, unrolled: bool):
        layer = lambda x, scale: (attention(x * scale, k, v), None)
        return jax.lax.scan(layer, q, jnp.arange(1, 4, dtype=q.dtype), unroll=3 if unrolled else 1)[0]

    gradients = [
        jax.jit(jax.value_and_grad(lambda q, u=unrolled: layers(q, u).astype(jnp.float32).sum()))(q)
        for unrolled in (False, True)
    ]
    remat = jax.checkpoint(lambda q: layers(q, False))
    gradients.append(jax.jit(jax.value_and_grad(lambda q: remat(q).astype(jnp.float32).sum()))(q))
    for other in gradients[1:]:  # XLA fuses what is between launches, and rounds, otherwise
        assert_close(other[1], gradients[0][1], "bfloat16", "gradient")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "flags",
    [dict(), dict(right=0), dict(left=300, right=0), dict(right=0, segments=True)],
    ids=["full", "causal", "window", "segments"],
)
def test_triton_repeats_when_the_device_is_full(flags, dtype):
    """Enough programs that they run in ever different orders."""
    case = Case(B=8, T=2048, S=2048, H=16, K=4, D=128, V=128, dtype=dtype, **flags)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    config = default_config(arrays, spec)
    first = run_triton(arrays, dout, dlse, spec, config)
    for _ in range(REPEATS - 1):
        again = run_triton(arrays, dout, dlse, spec, config)
        assert all(
            bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again))
        )


# Even lengths only: cuDNN's backward takes no others. What it is reported to compute wrongly is in `test_cudnn_faults_gpu.py`.
_CUDA = [
    Case(name="full", T=128, S=128),
    Case(name="causal", T=126, S=126, D=128, V=128, right=0),
    Case(name="causal-one-key-head", T=200, S=200, H=8, K=1, right=0),
    Case(name="window", T=256, S=256, D=128, V=128, left=31, right=0),
    Case(name="more-keys", T=64, S=200, D=96, V=96),
    Case(name="more-queries", T=200, S=62, D=40, V=40),
    Case(name="two-queries", T=2, S=126, H=3, K=3),
    Case(name="top-left", T=66, S=200, right=0, offset=0),
    Case(name="wide-heads", T=128, S=128, D=256, V=256, right=0),
    Case(name="half-a-tile", T=192, S=192, D=128, V=128, right=0),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", _CUDA, ids=lambda case: case.name)
def test_cuda(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    arrays, _ = make(case)
    dout, dlse = cotangents(case)
    window = None if case.left is None else (case.left, 0)
    attention = ejx.FlashAttention(case.right == 0, window, platform="cuda")
    offset = 0 if case.right == 0 else None

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, q_offset=offset), q, k, v)
        return Result(out, None, AttentionGrads(*pull(dout)))

    q, k, v, *_ = poison(case, arrays)
    assert_agrees(case, arrays, dout, jnp.zeros_like(dlse), run(q, k, v, dout))


def _chosen(attention: ejx.FlashAttention, *shape: int, dtype: str = "bfloat16", **arguments) -> str:
    x = jax.ShapeDtypeStruct(shape, dtype)
    return ejx.explain(attention, x, x, x, **arguments).choices[0].platform


def test_the_default_platform():
    shape = (2, 64, 4, 64)
    assert _chosen(ejx.FlashAttention(causal=True), *shape) == "cuda"
    assert _chosen(ejx.FlashAttention(causal=True, deterministic=True), *shape) == "triton"
    assert _chosen(ejx.FlashAttention(logits_soft_cap=30.0), *shape) == "triton"
    assert _chosen(ejx.FlashAttention(), *shape, dtype="float32") == "triton"
    assert _chosen(ejx.FlashAttention(), *shape, return_lse=True) == "triton"
    assert _chosen(ejx.FlashAttention(), 2, 64, 4, 320) == "xla"


def test_the_default_by_direction():
    """Hopper's forward is faster than cuDNN's by the shipped table; its gradients, which may be another platform's, agree with Triton's."""
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    problem = ejx.explain(ejx.FlashAttention(causal=True, platform="triton"), x, x, x).choices[0]
    if "H200" not in device_facts().kind or "hopper_programs=132" not in problem.config:
        pytest.skip("needs Hopper's forward and the H200's table")
    attention, triton = (ejx.FlashAttention(causal=True, platform=p) for p in (None, "triton"))
    assert _chosen(ejx.FlashAttention(causal=True), 4, 4096, 16, 128) == "triton"
    q, k, v = (_normal(seed, (1, 2048, 16, 128), 1) for seed in range(3))
    loss = lambda attention: lambda *qkv: jnp.sin(attention(*qkv).astype(jnp.float32)).sum()
    assert_same(jax.jit(attention)(q, k, v), jax.jit(triton)(q, k, v))
    found, expected = (jax.jit(jax.value_and_grad(loss(a), (0, 1, 2)))(q, k, v) for a in (attention, triton))
    for name, a, b in zip("qkv", found[1], expected[1], strict=True):
        assert_close(a, b, "bfloat16", "gradient", name=name)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("platform", [None, "triton", "xla"])
def test_keys_that_no_query_sees(platform, window):
    """Behind the last query of a top-left causal call, NaN reaches neither results nor gradients: they are those without such keys."""
    case = Case(B=2, T=64, S=192, H=4, K=2, right=0, offset=0, dtype="bfloat16")
    case = dataclasses.replace(case, left=None if window is None else window - 1)
    arrays, _ = make(case)
    dout, dlse = cotangents(case)
    late = jnp.arange(case.S)[None, :, None, None] >= case.T
    k, v = (jnp.where(late, jnp.asarray(jnp.nan, x.dtype), x) for x in (arrays.k, arrays.v))
    attention = ejx.FlashAttention(True, window, platform=platform)
    chosen = ejx.explain(attention, arrays.q, k, v, q_offset=0).choices[0].platform
    assert chosen == (platform or "cuda")

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, q_offset=0), q, k, v)
        return Result(out, None, AttentionGrads(*pull(dout)))

    actual = run(arrays.q, k, v, dout)
    assert_agrees(case, arrays, dout, jnp.zeros_like(dlse), actual)
    for gradient in (actual.grads.k, actual.grads.v):
        assert not np.asarray(gradient[:, case.T :], np.float32).any()


def test_a_bias_gradient_of_more_rows_than_a_grid_axis_takes():
    """70,000 rows of batch and heads, each with a bias of its own, and 65,600 tiles of keys for one that queries share."""
    for case in (
        Case(B=8750, T=16, S=16, H=8, K=8, D=16, V=16, bias="BHTS"),
        Case(B=1, T=16, S=65_600 * 32, H=1, K=1, D=16, V=16, bias="1H1S"),
    ):
        arrays, spec = make(case)
        dout, dlse = cotangents(case)
        actual = run_triton(arrays, dout, dlse, spec, default_config(arrays, spec))
        expected = on_host(run_reference, arrays, dout, dlse, spec)
        assert_close(actual.grads.bias, expected.grads.bias, "float32", "gradient", name="gradient of bias")


@pytest.mark.parametrize("platform", ["triton", "xla"])
@pytest.mark.parametrize("hide", ["segments", "bias"])
def test_cotangents_of_rows_that_see_nothing(hide, platform):
    """Whatever they hold, the gradients are those of the other rows."""
    case = Case(B=2, T=130, S=130, sinks="1H", dtype="bfloat16")
    arrays, _ = make(case)
    real = jnp.arange(130) < 70
    options: dict[str, Any] = dict(segment_ids=jnp.where(real, 0, -1)) if hide == "segments" else {}
    dout, dlse = cotangents(case)
    attention = ejx.FlashAttention(platform=platform)

    @jax.jit
    def gradients(dout, dlse, q, k, v, sinks):
        bias = dict(bias=jnp.where(real, 0, -jnp.inf)[:, None]) if hide == "bias" else {}
        call = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, return_lse=True, **bias, **options)
        return jax.vjp(call, q, k, v, sinks)[1]((dout, jnp.swapaxes(dlse, 1, 2)))

    assert arrays.sinks is not None
    given = (arrays.q, arrays.k, arrays.v, arrays.sinks[0])
    rows, heads = ~real[None, :, None, None], ~real[None, None, :]
    with_nan, without = (
        gradients(jnp.where(rows, value, dout), jnp.where(heads, value, dlse), *given)
        for value in (jnp.nan, 0)
    )
    assert_same(with_nan, without)
    assert all(bool(jnp.isfinite(x).all()) and bool(x.any()) for x in without)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_row_that_sees_nothing(dtype):
    """Gives 0 with a log-sum-exp of -inf and gradients of 0, whatever stands in what it does not see."""
    case = Case(B=2, T=130, S=130, right=0, dtype=dtype)
    arrays, _ = make(case)
    lengths = jnp.asarray([0, 70], jnp.int32)
    real = jnp.arange(130)[None, :, None, None] < lengths[:, None, None, None]
    q, k, v = (jnp.where(real, x, jnp.asarray(jnp.nan, x.dtype)) for x in arrays[:3])
    attention = ejx.FlashAttention(causal=True, platform="triton")

    @jax.jit
    def run(q, k, v):
        def total(q, k, v):
            out, lse = attention(q, k, v, q_lengths=lengths, kv_lengths=lengths, return_lse=True)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, lse)

        (_, (out, lse)), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, lse, grads

    out, lse, grads = run(q, k, v)
    hidden = ~np.asarray(real[..., 0, 0])
    assert (np.asarray(out, np.float32)[hidden] == 0).all()
    assert (np.asarray(lse)[hidden] == -np.inf).all() and np.isfinite(np.asarray(lse)[~hidden]).all()
    for gradient in grads:
        gradient = np.asarray(gradient, np.float32)
        assert (gradient[hidden] == 0).all() and np.isfinite(gradient).all() and gradient[~hidden].any()


def test_vmap_is_one_batched_call():
    arrays, _ = make(Case(B=6, T=100, S=100, right=0, dtype="bfloat16"))
    attention = ejx.FlashAttention(causal=True, platform="triton")
    together = jax.jit(attention)(*arrays[:3])
    split = [x.reshape(2, 3, *x.shape[1:]) for x in arrays[:3]]
    mapped = jax.jit(jax.vmap(jax.vmap(attention)))(*split)
    assert_same(together, mapped.reshape(together.shape))


def test_memory_is_linear_in_length():
    temporary = []
    for length in (4096, 8192):
        case = Case(B=1, T=length, S=length, D=64, V=64, right=0, sinks="1H", dtype="bfloat16")
        arrays, spec = make(case)
        config = default_config(arrays, spec)
        compiled = run_triton.lower(arrays, *cotangents(case), spec, config).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] <= 2.2 * temporary[0], temporary


# Offsets past 2^31 elements. The data has no period, so that a wrapped offset meets other values.

ROWS, HEADS, DIM, WINDOW = 2**19 + 192, 32, 128, 128


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], pieces: int) -> Array:
    piece = (shape[0] // pieces, *shape[1:])
    keys = jax.random.split(jax.random.key(seed), pieces)
    return jax.lax.map(lambda key: jax.random.normal(key, piece, jnp.bfloat16), keys).reshape(shape)


@pytest.mark.memory(48)
def test_sequences_past_two_to_the_31_elements():
    assert ROWS * HEADS * DIM > 2**31
    q, k, v, dout = (_normal(seed, (ROWS, HEADS, DIM), 16) for seed in range(4))
    attention = ejx.FlashAttention(True, WINDOW, platform="triton")

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(attention, q, k, v)
        return out, AttentionGrads(*pull(dout))

    out, grads = run(q, k, v, dout)
    # The first rows, those across 2^31 bytes, and the last, across 2^31 elements.
    for first in (WINDOW, 2**18 - 128, ROWS - 256):
        last = first + 256
        low, high = first - WINDOW, min(last + WINDOW, ROWS)
        arrays = AttentionArrays(q[None, first:high], k[None, low:high], v[None, low:high])
        case = Case(B=1, T=high - first, S=high - low, H=HEADS, K=HEADS, D=DIM, V=DIM, dtype="bfloat16")
        case = dataclasses.replace(case, left=WINDOW - 1, right=0, offset=WINDOW)
        dlse = jnp.zeros((1, HEADS, case.T))
        expected = on_host(run_reference, arrays, dout[None, first:high], dlse, case.spec)
        parts = on_host(uncertain_parts, arrays, dout[None, first:high], expected, case.spec)
        assert_close(out[first:last], expected.out[0, : last - first], "bfloat16", name=f"out from {first}")
        for name, skipped in (("q", 0), ("k", WINDOW), ("v", WINDOW)):
            wanted = slice(skipped, skipped + last - first)
            exact, part = (getattr(x, name)[0, wanted] for x in (expected.grads, parts))
            actual = getattr(grads, name)[first:last]
            assert_gradient_close(actual, exact, part, "bfloat16", f"gradient of {name} from {first}")


@pytest.mark.memory(25)
def test_a_bias_past_two_to_the_31_elements():
    length, heads = 8256, 32
    assert heads * length * length > 2**31
    q, k, v, dout = (_normal(seed, (length, heads, 64), 1) for seed in range(4))
    bias = _normal(4, (heads, length, length), heads)
    attention = ejx.FlashAttention(platform="triton")

    @jax.jit
    def run(q, k, v, bias, dout):
        def forward(q, k, v, bias) -> Any:
            return attention(q, k, v, bias=bias)

        out, pull = jax.vjp(forward, q, k, v, bias)
        *grads, dbias = pull(dout)
        return [out[:, -1], *(x[:, -1] for x in grads), dbias[-1]]

    @jax.jit
    def exact(*arrays):
        # One head in float32: on the host in float64 it would take too long.
        *qkv, bias, dout = (x.astype(jnp.float32) for x in arrays)
        spec = AttentionSpec(scale=64**-0.5)

        def forward(q, k, v, bias):
            q, k, v = (x[None, :, None] for x in (q, k, v))
            return reference.attend(AttentionArrays(q, k, v, bias[None, None]), spec)[0][0, :, 0]

        out, pull = jax.vjp(forward, *qkv, bias)
        return [out, *pull(dout)]

    actual = run(q, k, v, bias, dout)
    expected = exact(*(x[:, -1] for x in (q, k, v)), bias[-1], dout[:, -1])
    assert_close(actual[0], expected[0], "bfloat16", name="out")
    for name, a, b in zip(("q", "k", "v", "bias"), actual[1:], expected[1:], strict=True):
        assert_close(a, b, "bfloat16", "gradient", name=f"gradient of {name}")


@pytest.mark.parametrize("shape", [(4, 1), (1, 8)], ids=str)
def test_a_bias_of_some_leading_axes(shape):
    """It is read where it lies: the results of one written out, without the memory for that."""
    lead, length, heads = (4, 8), 1024, 8
    q, k, v, dout = (_normal(seed, (*lead, length, heads, 64), 1) for seed in range(4))
    bias = _normal(4, (*shape, heads, length, length), 1)
    full = jnp.broadcast_to(bias, (*lead, *bias.shape[2:]))
    attention = ejx.FlashAttention(causal=True, platform="triton")

    @jax.jit
    def run(q, k, v, bias, dout):
        def forward(q, k, v, bias) -> Any:
            return attention(q, k, v, bias=bias)

        out, pull = jax.vjp(forward, q, k, v, bias)
        return out, *pull(dout)

    compiled = run.lower(q, k, v, bias, dout).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < full.nbytes
    *actual, dbias = compiled(q, k, v, bias, dout)
    *expected, dfull = run(q, k, v, full, dout)
    assert_same(actual, expected)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    total = jnp.sum(dfull.astype(jnp.float32), axes, keepdims=True)
    assert_close(dbias, total, "bfloat16", "gradient", name="gradient of bias")


def test_everything_through_the_operation():
    """All flags at once, from the public call to the gradients of everything that has one."""
    case = dataclasses.replace(EVERYTHING, dtype="bfloat16", dropout=0.0)
    arrays, _ = make(case)
    bias, slopes, sinks = arrays.bias, arrays.alibi_slopes, arrays.sinks
    assert case.left is not None and bias is not None and slopes is not None and sinks is not None
    attention = ejx.FlashAttention(True, case.left + 1, case.soft_cap, platform="triton")
    plain = ejx.FlashAttention(True, case.left + 1, case.soft_cap, platform="xla")
    masking = dict(mask=arrays.mask, segment_ids=arrays.q_segments, kv_segment_ids=arrays.kv_segments)

    def results(attention, dtype):
        learned = [arrays.q, arrays.k, arrays.v, bias[:1], slopes[0], sinks[0]]
        learned = [x.astype(dtype) for x in learned[:4]] + learned[4:]

        def forward(q, k, v, bias, slopes, sinks):
            return attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, **masking)

        out, pull = jax.vjp(forward, *learned)
        return [out, *pull(jnp.ones_like(out))]

    actual = jax.jit(lambda: results(attention, jnp.bfloat16))()
    expected = jax.jit(lambda: results(plain, jnp.float32))()
    assert_close(actual[0], expected[0], "bfloat16", name="out")
    for n, (a, b) in enumerate(zip(actual[1:], expected[1:], strict=True)):
        assert_close(a, b, "bfloat16", "gradient", name=f"gradient {n}")
