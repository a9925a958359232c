"""Calls of `RingAttention` over several devices, in every way that users make them, for comparisons with dense attention in float64."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.ring.spec import Method, Order
from ejkernel_eqx.sequences import reorder_sequence, restore_sequence
from tests.attention.dense import causal, cotangents, exact, normal, qkv, with_gradients
from tests.tolerances import assert_close

KINDS = ("explicit", "explicit in context", "automatic", "automatic in context", "manual", "manual unchecked")
AXIS = "sequence"
BY_TOKEN = ("q", "k", "v", "segment_ids", "kv_segment_ids")
OVER_SCORES = ("bias", "mask")
T, HEADS, KV_HEADS = 24, 4, 2


class Options(NamedTuple):
    """Options of the module and arguments of its call, and what they mean to dense attention."""

    module: dict[str, Any] = {}  # noqa: RUF012
    call: dict[str, Any] = {}  # noqa: RUF012
    learned: dict[str, Any] = {}  # noqa: RUF012
    dense: dict[str, Any] = {}  # noqa: RUF012
    hidden: tuple[Any, Any] = (False, False)
    """Queries and keys `[B or 1, T]` that may hold NaN."""


def mesh_of(kind: str, devices: int, **others: int) -> Any:
    axis_type = AxisType.Explicit if kind.startswith("explicit") else AxisType.Auto
    names = (*others, AXIS)
    return jax.make_mesh((*others.values(), devices), names, axis_types=(axis_type,) * len(names))


def over(module: Any, kind: str, devices: int, order: str, **options: Any) -> Callable[..., Any]:
    """`(out, lse)` of whole arrays in temporal order, computed over devices."""
    mesh = mesh_of(kind, devices)
    by_token = {name: options.pop(name) for name in (*BY_TOKEN, *OVER_SCORES) if name in options}

    def stored(name: str, x: Any) -> Any:
        """In the order in which devices have tokens."""
        scores = [axis for axis in (-2, -1) if x.ndim > 1 and x.shape[axis] > 1]
        axes = {"q": [-3], "k": [-3], "v": [-3], "bias": scores, "mask": scores}
        for axis in axes.get(name, [-1] if name in BY_TOKEN else []) if order == "zigzag" else []:
            x = reorder_sequence(x, devices, axis=axis)
        return x

    def in_time(x: Any, axis: int) -> Any:
        return restore_sequence(x, devices, axis=axis) if order == "zigzag" else x

    def spec(name: str, x: Any) -> P:
        if name in BY_TOKEN:
            return P(*(None,) * (x.ndim - (3 if name in "qkv" else 1)), AXIS)
        return P(*(None,) * (x.ndim - 2), AXIS) if name in OVER_SCORES and x.shape[-2] > 1 else P()

    def call(**arrays: Any) -> Any:
        given = {name: stored(name, x) for name, x in {**by_token, **arrays}.items()}
        specs = {name: spec(name, x) for name, x in given.items()}
        run = lambda given: module(**given, **options, return_lse=True)
        if kind.startswith("manual"):
            out, checked = P(*(None,) * (given["q"].ndim - 3), AXIS), kind == "manual"
            run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(out, out), check_vma=checked)
        elif kind.startswith("explicit"):
            given = {n: jax.sharding.reshard(x, NamedSharding(mesh, specs[n])) for n, x in given.items()}
        else:
            put = jax.lax.with_sharding_constraint
            given = {n: put(x, NamedSharding(mesh, specs[n])) for n, x in given.items()}
        out, lse = run(given)
        if kind.startswith("explicit"):
            out, lse = (jax.sharding.reshard(x, NamedSharding(mesh, P())) for x in (out, lse))
        return in_time(out, out.ndim - 3), in_time(lse, lse.ndim - 2)

    return call


def compare(
    options: Options,
    devices: int,
    kind: str = "explicit",
    order: Order = "contiguous",
    method: Method | None = "ring",
    platform: ejx.PlatformLike = "xla",
    t: int = T,
    s: int | None = None,
    batch: int = 2,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> None:
    """One call and all its gradients against dense attention, with NaN in whatever is hidden."""
    arrays = qkv(*(batch,) * (batch > 0), t=t, s=s or t, heads=heads, kv_heads=kv_heads) | options.learned
    module = ejx.RingAttention(AXIS, order=order, method=method, platform=platform, **options.module)
    queries, keys = (np.asarray(x)[..., None, None] for x in options.hidden)
    hidden = {"q": queries, "k": keys, "v": keys}
    poisoned = arrays | {name: jnp.where(where, jnp.nan, arrays[name]) for name, where in hidden.items()}
    run = over(module, kind, devices, order, **options.call)
    dout, dlse = cotangents(arrays)
    (out, lse), grads = exact(arrays, dout, dlse, **options.dense)
    everywhere = lambda x: jax.device_put(x, NamedSharding(mesh_of(kind, devices), P()))
    placed = jax.tree.map(everywhere, (poisoned, dout, dlse))
    with jax.set_mesh(mesh_of(kind, devices)) if kind.endswith("context") else contextlib.nullcontext():
        actual, actual_grads = jax.jit(functools.partial(with_gradients, lambda given: run(**given)))(*placed)
    assert_close(actual[0], out, name="out")
    assert_close(actual[1], lse, name="lse")
    for name in arrays:
        assert_close(actual_grads[name], grads[name], kind="gradient", name=f"gradient of {name}")


I, J = np.arange(T)[:, None], np.arange(T)
IDS = np.array([[0] * 7 + [1] * 9 + [3] * 5 + [-1] * 3, [2] * 20 + [5] * 4])
SAME = (IDS[:, :, None] == IDS[:, None]) & (IDS[:, None] >= 0)
QUERIES, KEYS, OFFSETS = np.array([[T], [13]]), np.array([[19], [5]]), np.array([[-3], [7]])
MASK = np.random.default_rng(3).random((2, 1, T, T)) < 0.6
CAUSAL = {"causal": True}
SLOPES, BIAS = {"alibi_slopes": normal(6, HEADS) / 10}, normal(7, 2, HEADS, T, T)


def dropout() -> Options:
    key, q, k = jax.random.key(3), jnp.zeros((2, T, HEADS, 16)), jnp.zeros((2, T, KV_HEADS, 16))
    keep = np.asarray(ejx.Attention(dropout_rate=0.3)(q, k, k, key=key)[1]) > 0
    dense = {"seen": causal(T, T), "keep": keep, "rate": 0.3}
    return Options({"causal": True, "dropout_rate": 0.3}, {"key": key}, SLOPES, dense)


OPTIONS: dict[str, Callable[[], Options]] = {
    "plain": lambda: Options(),
    "causal_only": lambda: Options(CAUSAL, dense={"seen": causal(T, T)}),
    "window": lambda: Options(CAUSAL | {"sliding_window": 5}, dense={"seen": causal(T, T) & (J > I - 5)}),
    "two_sides": lambda: Options({"sliding_window": (3, 2)}, dense={"seen": (J >= I - 3) & (J <= I + 2)}),
    "soft_cap_and_sinks": lambda: Options(
        CAUSAL | {"logits_soft_cap": 2.0}, learned={"sinks": normal(5, HEADS, 2)}, dense={"seen": causal(T, T), "cap": 2.0}
    ),
    "alibi": lambda: Options(CAUSAL, learned=SLOPES, dense={"seen": causal(T, T)}),
    "segments": lambda: Options(
        CAUSAL, {"segment_ids": jnp.asarray(IDS, jnp.int32)}, dense={"seen": (causal(T, T) & SAME)[:, None]}, hidden=(IDS < 0, IDS < 0)
    ),
    "lengths": lambda: Options(
        CAUSAL | {"sliding_window": 9}, {"q_lengths": jnp.asarray(QUERIES[:, 0]), "kv_lengths": jnp.asarray(KEYS[:, 0])},
        dense={"seen": (causal(T, T) & (J > I - 9) & (J < KEYS[..., None]) & (I < QUERIES[..., None]))[:, None]},
        hidden=(QUERIES <= J, KEYS <= J),
    ),
    "offsets": lambda: Options(
        CAUSAL, {"q_offset": jnp.asarray(OFFSETS[:, 0])}, SLOPES,
        {"seen": (J <= I + OFFSETS[..., None])[:, None], "positions": J + OFFSETS}, hidden=(J + OFFSETS < 0, False),
    ),
    "bias_and_mask": lambda: Options(CAUSAL, {"mask": jnp.asarray(MASK)}, {"bias": BIAS[:1]}, {"seen": causal(T, T) & MASK}),
    "bias_of_keys": lambda: Options(learned={"bias": BIAS[:, :, :1]}),
    "dropout": dropout,
}  # fmt: skip


def together(*parts: Options) -> Options:
    """Options of several at once: what all leave visible, with what each hides hidden."""
    merged = Options({}, {}, {}, {"seen": np.ones((1, 1, T, T), bool)})
    for part in parts:
        for mine, theirs in zip(merged[:3], part[:3], strict=True):
            mine.update(theirs)
        seen = merged.dense["seen"] & part.dense.get("seen", True)
        merged.dense.update(part.dense | {"seen": seen})
    nobody = ~merged.dense["seen"].any(1)
    return merged._replace(hidden=(nobody.all(-1), nobody.all(-2)))
