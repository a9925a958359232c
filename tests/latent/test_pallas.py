"""The expanded form by its Pallas kernels for TPU, interpreted with races detected and memory poisoned, at lengths that cross tiles; and composed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.philox import philox_keep
from tests.attention.dense import causal, lse_of, normal, quick
from tests.latent.cases import arrays_of, check
from tests.latent.test_expanded import poison
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")

attention = functools.partial(ejx.MultiHeadLatentAttention, platform="pallas-interpret")
T, S, HEADS = 140, 200, 2

# Each of these checks a kind of call of an operation of one platform.


def dense(attention: Any) -> None:
    """Bias, slopes, sinks, a soft cap and dropout at once."""
    key = jax.random.key(3)
    seeds = jax.random.bits(key, (1, HEADS, 2), jnp.uint32)
    kept = np.asarray(
        philox_keep(seeds[:, :, None, None], jnp.arange(T)[:, None] + S - T, jnp.arange(S), 0.3)
    )
    scores = {"bias": normal(5, T, S), "alibi_slopes": normal(6, HEADS) / 9, "sinks": normal(7, HEADS)}
    op = attention(causal=True, logits_soft_cap=1.5, dropout_rate=0.3)
    given = arrays_of(1, t=T, s=S, heads=HEADS) | scores
    check(lse_of(op, key=key), given, causal(T, S), cap=1.5, keep=kept, rate=0.3)


def lengths(attention: Any) -> None:
    """Rows without keys, of padding and of an empty sequence."""
    keys, queries = np.array([150, 0]), np.array([T, 131])
    given = arrays_of(2, t=T, s=S, heads=1)
    seen = (np.arange(S) < keys[:, None, None]) & (np.arange(T) < queries[:, None])[..., None]
    op = lse_of(attention(), kv_lengths=jnp.asarray(keys), q_lengths=jnp.asarray(queries))
    hidden = np.arange(S) >= keys[:, None], np.arange(T) >= queries[:, None]
    check(op, given, seen[:, None], poisoned=poison(given, *hidden))


def packed(attention: Any) -> None:
    offsets = np.array([0, 57, 57, 130])
    number = np.searchsorted(offsets[1:], np.arange(T), side="right")
    seen = (number[:, None] == number) & (number < 3) & causal(T, T)
    given = arrays_of(t=T, s=T, heads=HEADS, dtype=jnp.bfloat16)
    op = lse_of(attention(causal=True), cu_seqlens=jnp.asarray(offsets))
    check(op, given, seen, poisoned=poison(given, number == 3, number == 3))


def blocks(attention: Any) -> None:
    """Heads that see other tiles, and a block of keys that nobody sees, with a bias."""
    table = np.random.default_rng(0).random((3, 4)) < 0.5
    table[:, 2] = False
    seen = np.repeat(np.repeat(table, 48, 0), 48, 1)[:T, :190]
    given = arrays_of(1, t=T, s=190, heads=1) | {"bias": normal(5, T, 190)}
    hidden = {name: x for name, x in given.items() if name != "bias"}
    poisoned = poison(hidden, np.arange(190)[None] // 48 == 2) | {"bias": given["bias"]}
    check(lse_of(attention(), mask=ejx.Mask.from_blocks(table, 48)), given, seen, poisoned=poisoned)


def wide(attention: Any) -> None:
    """The sizes of DeepSeek-V3."""
    sizes = {"q": (1, 130, 2, 192), "k": (1, 130, 2, 128), "k_rope": (1, 130, 64), "v": (1, 130, 2, 128)}
    given = {
        name: normal(n, *size, dtype=jnp.bfloat16) for n, (name, size) in enumerate(sorted(sizes.items()))
    }
    check(lse_of(attention(causal=True)), given, causal(130, 130))


def window(attention: Any) -> None:
    given = arrays_of(1, t=T, s=S, heads=HEADS)
    op = attention(causal=True, sliding_window=90)
    check(lse_of(op), given, causal(T, S) & ~causal(T, S, S - T - 90))


CASES = {case.__name__: case for case in (packed, window, wide, lengths, blocks, dense)}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_numpy(case):
    CASES[case](attention)


@pytest.mark.parametrize("t,s", [(0, 3), (3, 0)])
def test_empty(t, s):
    given = arrays_of(2, t=t, s=s)
    out, lse = attention()(**given, return_lse=True)
    assert out.shape == (2, t, 3, 12) and not out.any() and np.all(np.asarray(lse) == -np.inf)
    grads = jax.grad(lambda a: attention()(**a).sum())(given)
    assert {name: x.shape for name, x in grads.items()} == {name: x.shape for name, x in given.items()}
    assert not any(x.any() for x in grads.values())


@pytest.mark.slow
def test_maps_and_repeats():
    """vmap, also of queries over the same keys, and the same bits every time."""
    given = arrays_of(2, t=18, s=18)
    loss = lambda a: (attention(causal=True)(**a) ** 2).sum()
    gradient = quick(jax.grad(loss))
    expected, again, mapped = gradient(given), gradient(given), quick(jax.vmap(jax.grad(loss)))(given)
    shared = {name: x if name == "q" else x[0] for name, x in given.items()}
    axes = ({name: 0 if name == "q" else None for name in given},)
    of_shared = lambda module: (
        lambda a: (jax.vmap(lambda a: module(causal=True)(**a), in_axes=axes)(a) ** 2).sum()
    )
    found, wanted = (
        quick(jax.grad(of_shared(module)))(shared) for module in (attention, ejx.MultiHeadLatentAttention)
    )
    for name, x in expected.items():
        np.testing.assert_array_equal(again[name], x)
        assert_close(mapped[name], x, kind="gradient", name=name)
        assert_close(found[name], wanted[name], kind="gradient", name=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_over_devices(kind):
    """Batch and heads are split; what heads share has one gradient."""
    given = arrays_of(2, t=20, s=26, heads=4)
    loss = lambda call: lambda a: (call(a) ** 2).sum()
    of = lambda **options: lambda a: ejx.MultiHeadLatentAttention(causal=True, **options)(**a)
    wanted = quick(jax.value_and_grad(loss(of(platform="xla"))))(given)
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(axis,) * 2)
    specs = {name: P("dp") if name == "k_rope" else P("dp", None, "tp") for name in given}
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in given.items()}
    call = of(platform="pallas-interpret")
    if kind == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P("dp", None, "tp"))
    found = jax.jit(jax.value_and_grad(loss(call)))(placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_what_it_does_not_take():
    with pytest.raises(ejx.UnsupportedError, match="takes float32 and bfloat16, not float16"):
        attention()(**arrays_of(1, dtype=jnp.float16))
