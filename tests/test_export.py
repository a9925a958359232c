"""`jax.export` with symbols for batch and lengths: one program for any size, which gives what a program of that very size gives."""

import functools
import pathlib
import re
import tomllib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import export

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from ejkernel_eqx.attention.xla import XlaConfig, XlaTile
from ejkernel_eqx.dispatch import Problem, select, take_snapshot
from ejkernel_eqx.dispatch.problem import REPRESENTATIVE
from tests.attention.dense import exact, normal
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """A symbol is no `int`, as sizes are annotated everywhere."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


TILES = XlaConfig(XlaTile(16, 32), XlaTile(32, 16))


def exported(function: Callable[..., Any], *sizes: Any) -> export.Exported:
    """`sizes` are texts, such as `"b,t,4,8"`, for float32, or such texts with a dtype."""
    scope = export.SymbolicScope()
    pairs = [size if isinstance(size, tuple) else (size, jnp.float32) for size in sizes]
    shapes = [export.symbolic_shape(text, scope=scope) for text, _ in pairs]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, (_, dtype) in zip(shapes, pairs, strict=True)]
    return export.export(jax.jit(function))(*args)


# Attention against its plain mathematics in numpy

ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(sliding_window=(9, 3)), dict(window=(9, 3))),
    "all": ({}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["causal", pytest.param("window", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)],
)
def test_attention_of_any_lengths(name):
    """Queries and keys of their own lengths, shorter than a tile and longer, with gradients and a bias."""
    module = ejx.FlashAttention(**ATTENTION[name][0], config=TILES)

    def call(q, k, v, bias, dout):
        out, pull = jax.vjp(lambda *args: module(*args[:3], bias=args[3]), q, k, v, bias)
        return out, pull(dout)

    program = exported(call, "b,t,4,8", "b,s,2,8", "b,s,2,8", "1,4,t,s", "b,t,4,8")
    for b, t, s in ((2, 37, 50), (1, 3, 5)):
        shapes = dict(q=(b, t, 4, 8), k=(b, s, 2, 8), v=(b, s, 2, 8), bias=(1, 4, t, s))
        arrays = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        dout = normal(7, b, t, 4, 8)
        distance = np.arange(s) - (np.arange(t) + s - t)[:, None]
        seen: Any = {"causal": distance <= 0, "window": (distance >= -9) & (distance <= 3), "all": True}[name]
        expected = exact(arrays, dout, np.zeros((b, t, 4)), seen)
        out, grads = program.call(*arrays.values(), dout)
        assert_close(out, expected[0][0])
        for grad, x in zip(arrays, grads, strict=True):
            assert_close(x, expected[1][grad], kind="gradient", name=grad)


# Everything else against the program of the very size, in float64


Call = Callable[..., Any]


def floats(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if eqx.is_inexact_array(x) else x


def check(module: Any, call: Call, sizes: tuple[Any, ...], make: Call, *at: tuple[int, int]) -> None:
    """`call(module, *args)`, exported, at several batches and lengths: results by name, those of gradients with `d_` before."""
    program = exported(functools.partial(call, module), *sizes)
    for b, t in at:
        args = make(b, t)
        actual: Any = program.call(*args)
        with jax.enable_x64(True):
            wide, *rest = jax.tree.map(floats, (module, *args))
            expected = eqx.filter_jit(call)(wide, *rest)
            expected = jax.tree.map(lambda x: np.asarray(x, np.float64), expected)
        for name, result in actual.items():
            kind = "gradient" if name.startswith("d_") else "forward"
            assert_close(result, expected[name], kind=kind, name=f"{name} at {b}, {t}")


def rows(b: int, t: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values and two gates of four heads, and where segments lie."""
    q, k, v = (normal(i, b, t, 4, 8) for i in range(3))
    g, beta = (jax.nn.sigmoid(normal(i, b, t, 4)) for i in (3, 4))
    return q, k / 3, v, -g, beta, ids(b, t)


ROWS = (*["b,t,4,8"] * 3, *["b,t,4"] * 2, ("b,t", jnp.int32))


def ids(b: int, t: int) -> jax.Array:
    return jnp.asarray(np.broadcast_to(np.arange(t) * 3 // t, (b, t)), jnp.int32)


def differentiated(function: Call, *args: Any) -> dict[str, Any]:
    """`out`, the final state, and the gradients of all arguments."""

    def loss(*args):
        out, state = function(*args)
        weights = jnp.cos(jnp.arange(out.shape[-1], dtype=out.dtype))[(None,) * (out.ndim - 1)]
        return jnp.sum(out * weights) + jnp.sum(state * state), (out, state)

    grads, (out, state) = jax.grad(loss, tuple(range(len(args))), has_aux=True)(*args)
    return {"out": out, "state": state} | {f"d_{i}": grad for i, grad in enumerate(grads)}


def delta(module, *args):
    *operands, segments = args
    return differentiated(lambda *x: module(*x, segment_ids=segments), *operands)


def by_channel(module, q, k, v, g, beta, segments):
    return differentiated(lambda q, k, v, g: module(q, k, v, g[..., None] * jnp.ones_like(k)), q, k, v, g)


def packed(module, q, k, v, g, beta, segments):
    """All rows after one another, as two sequences."""
    length = q.shape[0] * q.shape[1]
    flat = [x.reshape(length, *x.shape[2:]) for x in (q, k, v, g, beta)]
    offsets = jnp.stack(
        [jnp.zeros((), jnp.int32), *(jnp.asarray(n, jnp.int32) for n in (length // 3, length))]
    )
    out, state = module(*flat, cu_seqlens=offsets)
    return {"out": out, "state": state}


RECURRENCES: dict[str, tuple[Any, Call]] = {
    "delta rule": (lambda: ejx.GatedDeltaRule(), delta),
    "delta rule, packed": (lambda: ejx.GatedDeltaRule(), packed),
    "gated linear": (lambda: ejx.GatedLinearAttention(), by_channel),
    "linear": (
        lambda: ejx.LinearAttention(),
        lambda module, q, k, v, g, *_: differentiated(lambda q, k, v, g: module(q, k, v, g=g), q, k, v, g),
    ),
    "values' decay": (
        lambda: ejx.LinearAttention(),
        lambda module, q, k, v, g, *_: differentiated(
            lambda q, k, v, g: module(q, k, v, gv=g[..., None] * jnp.ones_like(v)), q, k, v, g
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "linear" else pytest.mark.slow) for name in RECURRENCES],
)
def test_recurrences_of_any_length(name):
    module, call = RECURRENCES[name]
    check(module(), call, ROWS, rows, (2, 131), (1, 5))


def short(module, x, segments):
    """The convolution, the norm and the scan, as a mixer has them."""
    convolution, norm, scan = module
    x, _ = convolution(x, jnp.ones((6, 4), x.dtype) / 4, segment_ids=segments)
    B = jnp.cos(x)
    out, state = scan(x, jnp.abs(x) / 8, -jnp.ones((6, 6), x.dtype), B, x, segment_ids=segments)
    return {"out": norm(out, x, jnp.ones(6, x.dtype)), "state": state}


@pytest.mark.slow
def test_scan_convolution_and_norm_of_any_length():
    modules = (ejx.CausalConv1d(), ejx.GatedRMSNorm(), ejx.StateSpaceV1())
    sizes = ("b,t,6", ("b,t", jnp.int32))
    check(modules, short, sizes, lambda b, t: (normal(0, b, t, 6), ids(b, t)), (2, 50), (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_pooling_of_any_length(reduction):
    make = lambda **options: ejx.MeanPooling(reduction, platform="xla", **options)
    modules = (make(normalize=True), make(chunk_size=7), make(num_segments=3))

    def call(modules, x, segments):
        rows, chunks, by_id = modules
        return {
            "rows": rows(x),
            "masked rows": rows(x, mask=segments == 0),
            "chunks": chunks(x),
            "masked chunks": chunks(x, mask=segments > 0),
            "ids": by_id(x, segment_ids=segments),
        }

    sizes = ("b,t,6", ("b,t", jnp.int32))
    check(modules, call, sizes, lambda b, t: (normal(0, b, t, 6), ids(b, t)), (2, 50), (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_matmul_of_any_number_of_rows(gathered):
    """One program for any number of rows, with gradients: fewer than a tile, and several tiles."""
    from tests.matmul.cases import Case, make

    op = ejx.GroupedMatmul("silu")

    def call(lhs, rhs, up, sizes, dout, *rows):
        run = lambda lhs, rhs, up: op(lhs, rhs, sizes, up=up, row_indices=rows[0] if rows else None)
        out, pull = jax.vjp(run, lhs, rhs, up)
        return out, pull(dout)

    shapes = ["l,6" if gathered else "m,6", "3,6,4", "3,6,4", ("3", jnp.int32), "m,4"]
    program = exported(call, *shapes, *([("m", jnp.int32)] if gathered else []))
    for sizes, rows in (((2, 0, 1), 4), ((1000, 700, 0), 1701)):
        case = Case(sizes, M=rows, K=6, N=4, gated="pair", gathered=rows // 2 if gathered else None)
        given, dout = make(case)
        args = [given["lhs"], given["rhs"], given["up"], given["group_sizes"], dout]
        args += [given["row_indices"]] if gathered else []
        for x, y in zip(
            jax.tree.leaves(program.call(*args)), jax.tree.leaves(jax.jit(call)(*args)), strict=True
        ):
            assert_close(x, y, kind="gradient")


KEY = jax.random.key(0)
LAYERS: dict[str, Callable[[], Any]] = {
    "attention": lambda: nn.MultiHeadAttention(
        16, num_heads=4, num_kv_heads=2, causal=True, rope=nn.RotaryEmbedding(4), key=KEY
    ),
    "mamba2": lambda: nn.Mamba2Mixer(16, state_size=8, head_dim=8, key=KEY),
    "mamba1": lambda: nn.Mamba1Mixer(16, key=KEY),
    "kimi": lambda: nn.KimiDeltaAttention(16, num_heads=2, key=KEY),
    "delta net": lambda: nn.GatedDeltaNet(16, num_k_heads=2, head_dim=8, key=KEY),
    "gated linear": lambda: nn.GatedLinearAttention(16, num_heads=2, key=KEY),
    "lightning": lambda: nn.LightningAttention(16, num_heads=2, key=KEY),
    "lstm": lambda: nn.LSTM(16, 8, num_layers=2, bidirectional=True, key=KEY),
    "gru": lambda: nn.GRU(16, 8, key=KEY),
}
_DEFAULT = ("attention",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _DEFAULT else pytest.mark.slow) for name in LAYERS]
)
def test_layers_of_any_length(name):
    layer = LAYERS[name]()
    make = lambda b, t: (normal(0, b, t, 16), ids(b, t))
    call = lambda layer, x, segments: {"out": layer(x, segment_ids=segments)}
    check(layer, call, ("b,t,16", ("b,t", jnp.int32)), make, (2, 70), (1, 3))


@pytest.mark.slow
def test_a_mixture_of_experts_of_any_length():
    layer = nn.MixtureOfExperts(16, 8, num_experts=3, top_k=2, shared_dim=4, key=KEY)
    make = lambda b, t: (normal(0, b, t, 16), jnp.arange(b * t).reshape(b, t) % 5 > 0)
    call = lambda layer, x, real: {"out": layer(x, padding_mask=real)}
    check(layer, call, ("b,t,16", ("b,t", jnp.bool_)), make, (2, 7), (1, 3))


# Programs in files


def test_what_writes_programs_to_files_is_in_an_extra():
    root = pathlib.Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert [requirement.partition(">")[0] for requirement in extras["export"]] == ["flatbuffers"]
    assert any(re.match(r"ejkernel-eqx\[.*\bexport\b", requirement) for requirement in extras["test"])
    assert "the extra `export`" in (root / "docs/getting-started.md").read_text(encoding="utf-8")


def test_a_program_in_a_file_is_the_same_program():
    pytest.importorskip("flatbuffers")
    layer = nn.GatedRMSNorm(8)
    program = exported(lambda x: layer(x), "b,8")
    x = normal(0, 3, 8)
    np.testing.assert_array_equal(export.deserialize(program.serialize()).call(x), program.call(x))


# What a symbol is to the choice


def test_a_problem_of_symbols():
    (b, t) = export.symbolic_shape("b, t")
    make = functools.partial(Problem.make, "op", dtypes={"x": "float32"}, flags={}, lengths={"B", "T"})
    problem, other = make(dims={"B": b, "T": t, "D": 8}), make(dims={"B": t, "T": b * 2, "D": 8})
    assert problem == other and problem.key() == other.key() and problem.symbolic == {"B", "T"}
    known = make(dims={"B": REPRESENTATIVE, "T": REPRESENTATIVE, "D": 8})
    assert (
        problem.dims == known.dims
        and problem.key() != known.key() != make(dims={"B": 4, "T": t, "D": 8}).key()
    )
    assert Problem.from_dict(problem.to_dict()) == problem
    assert str(problem) == "op B* D8 T* float32"
    assert "symbolic" not in known.key() and "symbolic" not in known.to_dict()


def test_kernels_that_need_sizes_refuse_symbols():
    pytest.importorskip("triton")
    module = ejx.FlashAttention(platform="triton-interpret")
    with pytest.raises(
        ejx.UnsupportedError,
        match="sizes that are known when the call is traced, not symbolic sizes for B, S, T",
    ):
        exported(lambda q: module(q, q, q), "b,t,4,8")
    with ejx.recording() as calls:
        exported(lambda q: ejx.FlashAttention()(q, q, q), "b,t,4,8")
    assert {call.platform.value for call in calls} == {"xla"}
    (call,) = {call.problem for call in calls}
    assert select(take_snapshot("flash_attention", platform="xla"), call).config == calls[0].config
