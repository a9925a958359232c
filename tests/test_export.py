"""`jax.export` with symbols for batch and lengths: one program for any size, which gives what a program of that very size gives."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ejkernel_eqx as ejx
from ejkernel_eqx import models, nn
from tests.attention.dense import exact, normal
from tests.tolerances import assert_close

# A symbol is no `int`, as sizes are annotated everywhere.
pytestmark = pytest.mark.usefixtures("unchecked")


def exported(function: Callable[..., Any], *sizes: Any) -> export.Exported:
    """`sizes` are texts, such as `"b,t,4,8"`, for float32, or such texts with a dtype."""
    scope = export.SymbolicScope()
    pairs = [size if isinstance(size, tuple) else (size, jnp.float32) for size in sizes]
    shapes = [export.symbolic_shape(text, scope=scope) for text, _ in pairs]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, (_, dtype) in zip(shapes, pairs, strict=True)]
    return export.export(jax.jit(function))(*args)


# Attention against its plain mathematics in numpy


@pytest.mark.slow
def test_attention_of_any_lengths():
    """Queries and keys of their own lengths, shorter than a tile and longer, with gradients and a bias."""
    module = ejx.FlashAttention(sliding_window=(9, 3))

    def call(q, k, v, bias, dout):
        out, pull = jax.vjp(lambda *args: module(*args[:3], bias=args[3]), q, k, v, bias)
        return out, pull(dout)

    program = exported(call, "b,t,4,8", "b,s,2,8", "b,s,2,8", "1,4,t,s", "b,t,4,8")
    for b, t, s in ((2, 137, 150), (1, 3, 5)):
        shapes = dict(q=(b, t, 4, 8), k=(b, s, 2, 8), v=(b, s, 2, 8), bias=(1, 4, t, s))
        arrays = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        dout = normal(7, b, t, 4, 8)
        distance = np.arange(s) - (np.arange(t) + s - t)[:, None]
        expected = exact(arrays, dout, np.zeros((b, t, 4)), (distance >= -9) & (distance <= 3))
        out, grads = program.call(*arrays.values(), dout)
        assert_close(out, expected[0][0])
        for grad, x in zip(arrays, grads, strict=True):
            assert_close(x, expected[1][grad], kind="gradient", name=grad)


# Everything else against the program of the very size, in float64


Call = Callable[..., Any]
IDS = ("b,t", jnp.int32)


def floats(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if eqx.is_inexact_array(x) else x


def ids(b: int, t: int) -> jax.Array:
    return jnp.asarray(np.broadcast_to(np.arange(t) * 3 // t, (b, t)), jnp.int32)


def check(module: Any, call: Call, width: int | None, long: int) -> None:
    """`call(module, *args)`, exported, for several batches and lengths: results by name, those of gradients with `d_` before. Its arguments are
    tokens of a width and their segments, or those of a recurrence."""
    sizes = (*["b,t,4,8"] * 3, *["b,t,4"] * 2, IDS) if width is None else (f"b,t,{width}", IDS)
    program = exported(functools.partial(call, module), *sizes)
    for b, t in ((2, long), (1, 3)):
        args = rows(b, t) if width is None else (normal(0, b, t, width), ids(b, t))
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


def differentiated(function: Call, *args: Any) -> dict[str, Any]:
    """`out`, the final state, and the gradients of all arguments."""
    (out, state), pull = jax.vjp(function, *args)
    grads = pull((jnp.cos(out), jnp.cos(state)))
    return {"out": out, "state": state} | {f"d_{i}": grad for i, grad in enumerate(grads)}


def delta(module, *args):
    *operands, segments = args
    return differentiated(lambda *x: module(*x, segment_ids=segments), *operands)


def by_channel(module, q, k, v, g, beta, segments):
    return differentiated(lambda q, k, v, g: module(q, k, v, g[..., None] * jnp.ones_like(k)), q, k, v, g)


def values_decay(module, q, k, v, g, beta, segments):
    return differentiated(lambda q, k, v, g: module(q, k, v, gv=g[..., None] * jnp.ones_like(v)), q, k, v, g)


def packed(module, q, k, v, g, beta, segments):
    """All rows after one another, as two sequences."""
    length = q.shape[0] * q.shape[1]
    flat = [x.reshape(length, *x.shape[2:]) for x in (q, k, v, g, beta)]
    offsets = jnp.stack([jnp.asarray(n, jnp.int32) for n in (0, length // 3, length)])
    out, state = module(*flat, cu_seqlens=offsets)
    return {"out": out, "state": state}


def pooled(modules, x, segments):
    by_row, chunks, by_id = modules
    return {
        "rows": by_row(x),
        "masked rows": by_row(x, mask=segments == 0),
        "chunks": chunks(x),
        "masked chunks": chunks(x, mask=segments > 0),
        "ids": by_id(x, segment_ids=segments),
    }


def pooling(reduction) -> Any:
    make = functools.partial(ejx.MeanPooling, reduction, platform="xla")
    return make(normalize=True), make(chunk_size=7), make(num_segments=3)


def layer(module, x, segments):
    return {"out": module(x, segment_ids=segments)}


def experts(module, x, segments):
    return {"out": module(x, padding_mask=segments < 2)}


KEY = jax.random.key(0)
LAYERS: dict[str, Callable[[], Any]] = {
    "attention": lambda: nn.MultiHeadAttention(16, num_heads=4, rope=nn.RotaryEmbedding(4), key=KEY),
    "mamba2": lambda: nn.Mamba2Mixer(16, state_size=8, head_dim=8, key=KEY),
    "mamba3": lambda: nn.Mamba3Mixer(16, state_size=8, head_dim=8, mimo_rank=2, key=KEY),
    "mamba1": lambda: nn.Mamba1Mixer(16, key=KEY),
    "kimi": lambda: nn.KimiDeltaAttention(16, num_heads=2, key=KEY),
    "lstm": lambda: nn.LSTM(16, 8, num_layers=2, bidirectional=True, key=KEY),
}
# What makes the module, how it is called, the width of its tokens, and a length of several chunks.
CASES: dict[str, tuple[Any, ...]] = {
    "delta rule": (ejx.GatedDeltaRule, delta, None, 131),
    "delta rule, packed": (ejx.GatedDeltaRule, packed, None, 131),
    "gated linear": (ejx.GatedLinearAttention, by_channel, None, 131),
    "values' decay": (ejx.LinearAttention, values_decay, None, 131),
    "mean": (lambda: pooling("mean"), pooled, 6, 50),
    "max": (lambda: pooling("max"), pooled, 6, 50),
    "experts": (
        lambda: nn.MixtureOfExperts(16, 8, num_experts=3, top_k=2, shared_dim=4, key=KEY),
        experts,
        16,
        7,
    ),
} | {name: (make, layer, 16, 70) for name, make in LAYERS.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "attention" else pytest.mark.slow) for name in CASES]
)
def test_any_length(name):
    make, *rest = CASES[name]
    check(make(), *rest)


@pytest.mark.slow
def test_grouped_matmul_of_any_number_of_rows():
    """One program for any number of rows, with gradients: fewer than a tile, and several tiles."""
    from tests.matmul.cases import Case, make

    op: Any = ejx.GroupedMatmul("silu")

    def call(lhs, rhs, up, sizes, dout, rows):
        out, pull = jax.vjp(lambda *args: op(*args[:2], sizes, up=args[2], row_indices=rows), lhs, rhs, up)
        return out, pull(dout)

    program = exported(call, "l,6", "3,6,4", "3,6,4", ("3", jnp.int32), "m,4", ("m", jnp.int32))
    for sizes, rows in (((2, 0, 1), 4), ((1000, 700, 0), 1701)):
        given, dout = make(Case(sizes, M=rows, K=6, N=4, gated="pair", gathered=rows // 2))
        args = [*(given[name] for name in ("lhs", "rhs", "up", "group_sizes")), dout, given["row_indices"]]
        for x, y in zip(jax.tree.leaves(program.call(*args)), jax.tree.leaves(jax.jit(call)(*args))):
            assert_close(x, y, kind="gradient")


# Programs in files


def test_a_program_in_a_file_is_the_same_program():
    pytest.importorskip("flatbuffers")
    layer = nn.GatedRMSNorm(8)
    program = exported(lambda x: layer(x), "b,8")
    x = normal(0, 3, 8)
    np.testing.assert_array_equal(export.deserialize(program.serialize()).call(x), program.call(x))


# Whole models


def decoder(mixer: str, **options: Any) -> models.Decoder:
    layer = models.LayerConfig(mixer, options, models.MLPConfig(24))
    return models.Decoder(models.DecoderConfig(11, 16, (layer,)), key=jax.random.key(0))


LATENT = {"num_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
TOKENS = jnp.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 9, 8, 7, 6]], jnp.int32)


def exported_tokens(function: Any, form: str) -> export.Exported:
    return export.export(jax.jit(function))(jax.ShapeDtypeStruct(export.symbolic_shape(form), jnp.int32))


def test_latent_attention_of_any_lengths():
    model = decoder("latent_attention", **LATENT)
    assert_close(exported_tokens(lambda tokens: model(tokens), "b,t").call(TOKENS), model(TOKENS))


def test_loss_and_gradient_of_any_number_of_tokens():
    model = decoder("attention", num_heads=2)

    def step(tokens):
        loss = lambda model: model.loss(model.features(tokens), tokens)
        value, gradient = eqx.filter_value_and_grad(loss)(model)
        return value, gradient.embedding

    program = exported_tokens(step, "b,t")
    for tokens in (TOKENS, jnp.tile(TOKENS, (1, 120))):  # less than a chunk, and several
        for found, wanted in zip(program.call(tokens), step(tokens), strict=True):
            assert_close(found, wanted, kind="gradient")


@pytest.mark.parametrize("mixer, options", [("attention", {"num_heads": 2}), ("latent_attention", LATENT)])
def test_steps_of_any_number_of_rows_in_a_file(mixer, options):
    """With a cache, which checks its room in other programs by calling the host."""
    pytest.importorskip("flatbuffers")
    model = decoder(mixer, **options)

    def step(tokens):
        x, cache = model.features(tokens, model.init_cache(tokens.shape[0], 8))
        x, _ = model.features(jnp.argmax(model.logits(x[:, -1:]), -1), cache)
        return model.logits(x)

    wanted = jax.jit(step)(TOKENS)
    with ejx.check_values(False):
        program = export.deserialize(exported_tokens(lambda tokens: step(tokens), "b,5").serialize())
    assert_close(program.call(TOKENS), wanted)


def test_generate_in_a_file():
    pytest.importorskip("flatbuffers")
    model = decoder("attention", num_heads=2)
    call = lambda tokens: models.generate(model, tokens, max_new_tokens=3).tokens
    with ejx.check_values(False):
        program = export.deserialize(exported_tokens(call, "3,5").serialize())
    np.testing.assert_array_equal(program.call(TOKENS), call(TOKENS))
    with pytest.raises(ValueError, match=r"prompts: expected sizes that are known, received shape \(b, 5\)"):
        exported_tokens(call, "b,5")


# What a symbol is to the choice


def test_a_problem_of_symbols():
    (b, t) = export.symbolic_shape("b, t")
    make = functools.partial(ejx.Problem.make, "op", dtypes={"x": "float32"}, flags={}, lengths={"B", "T"})
    problem, other = make(dims={"B": b, "T": t, "D": 8}), make(dims={"B": t, "T": b * 2, "D": 8})
    assert problem == other and problem.key() == other.key() and problem.symbolic == {"B", "T"}
    known = make(dims=dict(problem.dims))
    assert problem.key() != known.key() != make(dims={"B": 4, "T": t, "D": 8}).key()
    assert ejx.Problem.from_dict(problem.to_dict()) == problem
    assert str(problem) == "op B* D8 T* float32"
    assert "symbolic" not in known.key() and "symbolic" not in known.to_dict()


def test_kernels_that_need_sizes_refuse_symbols():
    pytest.importorskip("triton")
    module = ejx.FlashAttention(platform="triton-interpret")
    with pytest.raises(ejx.UnsupportedError, match=r"known when the call is traced.* for B, S, T"):
        exported(lambda q: module(q, q, q), "b,t,4,8")
    with ejx.recording() as calls:
        exported(lambda q: ejx.FlashAttention()(q, q, q), "b,t,4,8")
    assert {call.platform.value for call in calls} == {"xla"}
