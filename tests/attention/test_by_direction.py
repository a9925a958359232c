"""A platform that is faster forward runs where nothing is differentiated, another one where gradients are asked for."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.cases import xla_tiles
from tests.attention.dense import normal
from tests.attention.inner import (
    Backend,
    BOTH,
    choices_of,
    cudnn,
    FORWARD,
    Implementation,
    inputs,
    kernel_registry,
    Known,
    LSE_NAME,
    memory_cache,
    OUT_NAME,
    Platform,
    reference,
)  # fmt: skip
from tests.meshes import context, everywhere, HEADS, mesh_of, P, ROWS
from tests.tolerances import assert_close

OPERATION = "flash_attention"


def _attend(arrays, spec):
    """The mathematics itself, for any leading axes, as cuDNN takes them."""
    lead = arrays.q.shape[:-3]
    flat = arrays._replace(
        **{n: x.reshape((-1, *x.shape[len(lead) :])) for n, x in arrays._asdict().items() if x is not None}
    )
    out = reference.attend(flat, spec)[0].astype(arrays.q.dtype)
    return out.reshape((*lead, *out.shape[1:]))


LIBRARY = types.SimpleNamespace(
    OPAQUE=True,
    attend=_attend,
    default_config=cudnn.default_config,
    candidates=cudnn.candidates,
    unsupported=lambda problem, device: "takes no rows" if problem.flag("rows") else None,
    config_type=cudnn.CudnnConfig,
)


@pytest.fixture(autouse=True)
def library(nothing_known):
    """The vendor's library, of which this machine has none."""
    added = Implementation(OPERATION, Platform.CUDA, Backend.ANY, 40, "attention", LIBRARY)
    kernel_registry.add(added)
    yield
    kernel_registry.remove(added)


def learn(module: Any, *args: Any, forward: str, **options: Any) -> None:
    """XLA is timed to be faster in one direction, the library in the other one, for exactly this call."""
    found = next(iter(choices_of(module, inputs(*args, **options)))).problem
    fast, slow = {FORWARD: 1.0, BOTH: 3.0}, {FORWARD: 2.0, BOTH: 2.0}
    for platform, config in ((Platform.XLA, xla_tiles(16, 16)), (Platform.CUDA, cudnn.CudnnConfig())):
        ms = tuple((fast if platform == forward else slow).items())
        memory_cache.put(platform, found.key(), Known(config, ms, "measured", sizes=found.dims))


def chosen(function: Any, *args: Any, **options: Any) -> set[str]:
    # A plain function, since Equinox warns of transformed ones.
    call = lambda *args, **options: function(*args, **options)
    return {choice.platform.value for choice in choices_of(call, inputs(*args, **options))}


def three(*lead: int, heads: int = 4) -> list[jax.Array]:
    return [normal(seed, *lead, 40, heads, 16) for seed in range(3)]


def loss(function: Any) -> Any:
    return lambda *args: jnp.sum(jnp.sin(function(*args)))


@pytest.mark.few(1)
@pytest.mark.parametrize("forward, trained", [("xla", "cuda"), ("cuda", "xla")])
def test_what_is_asked_for_decides(forward, trained):
    q, k, v = three(2)
    learn(ejx.FlashAttention(causal=True), q, k, v, forward=forward)
    module = ejx.FlashAttention(causal=True)
    plain = ejx.FlashAttention(causal=True, platform="xla")
    weight = loss(module)
    gradient = jax.grad(weight, (0, 1, 2))
    stepped = jax.value_and_grad(
        lambda q: jax.lax.scan(lambda x, _: (module(x, k, v), None), q, None, 3)[0].sum()
    )
    assert chosen(module, q, k, v) == chosen(jax.jit(module), q, k, v) == {forward}
    assert chosen(jax.vmap(module), q, k, v) and chosen(weight, q, k, v) == {forward}
    for way in (gradient, jax.jit(gradient), jax.grad(jax.checkpoint(weight)), jax.grad(jax.jit(weight))):
        assert chosen(way, q, k, v) == {trained}
    assert chosen(stepped, q) == {trained}
    assert_close(module(q, k, v), plain(q, k, v))
    expected = jax.grad(loss(plain), (0, 1, 2))(q, k, v)
    for a, b in zip(gradient(q, k, v), expected, strict=True):
        assert_close(a, b, kind="gradient")
    # Named results can be saved.
    names = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    for a, b in zip(
        jax.grad(jax.checkpoint(weight, policy=names), (0, 1, 2))(q, k, v), expected, strict=True
    ):
        assert_close(a, b, kind="gradient")
    with pytest.raises(ejx.UnsupportedError, match="reverse-mode"):
        jax.jvp(lambda q: module(q, k, v), (q,), (q,))


def test_explain_and_recording_name_what_runs():
    q, k, v = three(2)
    learn(ejx.FlashAttention(), q, k, v, forward="xla")
    module = ejx.FlashAttention()
    (row,) = ejx.explain(module, q, k, v).choices
    assert row.platform == "xla" and dict(row.rejected)["cuda"].endswith("2.00 times as slow as xla, forward")
    gradient = jax.jit(jax.grad(loss(module)))
    (row,) = ejx.explain(lambda *args: gradient(*args), q, k, v).choices
    assert row.platform == "cuda" and "cuda" not in dict(row.rejected)
    both, alone = ejx.explain(OPERATION, B=2, T=40, S=40, H=4, D=16, dtype="float32", causal=False).choices
    assert (both.platform, alone.platform) == ("cuda", "xla") and alone.notes[0] == "forward alone"
    with ejx.recording() as calls:
        gradient(q, k, v)
    assert [call.platform for call in calls] == ["cuda"]
    with ejx.recording() as calls:
        jax.jit(module)(q, k, v)
    assert [call.platform for call in calls] == ["xla"]
    assert chosen(ejx.FlashAttention(platform="xla"), q, k, v) == {"xla"}
    assert chosen(jax.grad(loss(ejx.FlashAttention(config=xla_tiles(16, 16)))), q, k, v) == {"xla"}


@pytest.mark.slow
def test_under_vmap():
    """Mapped before or after it is differentiated, over some arguments only, and beside whole numbers."""
    q, k, v = three(3)
    segments = jnp.asarray([[0] * 10 + [1] * 25 + [-1] * 5] * 3)
    ids = dict(segment_ids=segments[0])
    learn(ejx.FlashAttention(), q[0], k[0], v[0], forward="xla", **ids)
    module, plain = ejx.FlashAttention(), ejx.FlashAttention(platform="xla")

    def ways(module):
        one = lambda q, k, v, segments: module(q, k, v, segment_ids=segments)
        mapped = jax.vmap(one, (0, None, 0, 0))
        yield jax.vmap(jax.grad(loss(one), (0, 1, 2)), (0, None, 0, 0))
        yield jax.grad(loss(mapped), (0, 1, 2))
        yield jax.vmap(jax.grad(loss(jax.checkpoint(one)), (0, 1, 2)), (0, None, 0, 0))

    for way, expected in zip(ways(module), ways(plain), strict=True):
        assert chosen(way, q, k[0], v, segments) == {"cuda"}
        for a, b in zip(way(q, k[0], v, segments), expected(q, k[0], v, segments), strict=True):
            assert_close(a, b, kind="gradient")


@everywhere
def test_on_meshes(kind, layout):
    q, k, v = three(4)
    learn(ejx.FlashAttention(), q, k, v, forward="xla")
    module, plain = ejx.FlashAttention(), ejx.FlashAttention(platform="xla")
    expected = plain(q, k, v), jax.grad(loss(plain), (0, 1, 2))(q, k, v)
    mesh = mesh_of(kind)
    placed = P(ROWS if layout != "tensor" else None, None, HEADS if layout != "data" else None)
    with context(kind, mesh):
        given = [jax.device_put(x, jax.NamedSharding(mesh, placed)) for x in (q, k, v)]
        assert chosen(module, *given) == {"xla"}
        assert_close(jax.jit(module)(*given), expected[0])
        gradient = jax.grad(loss(module), (0, 1, 2))
        assert chosen(gradient, *given) == {"cuda"}
        for a, b in zip(jax.jit(gradient)(*given), expected[1], strict=True):
            assert_close(a, b, kind="gradient")
