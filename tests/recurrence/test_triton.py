"""The Triton kernels of all members that they take, interpreted."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.compiled import executed
from tests.recurrence.cases import (
    BEFORE,
    Case,
    CASES,
    CLOSED,
    CONSTANT,
    DPLR,
    EMPTY,
    KEY,
    make,
    NONE,
    SCALAR,
    VALUE,
)
from tests.tolerances import assert_close

pytest.importorskip("triton")
import triton.language as tl

from ejkernel_eqx.recurrence.triton import linear_host, reach, shared_host
from ejkernel_eqx.recurrence.triton import splits as splitting
from ejkernel_eqx.recurrence.triton.call import make_call
from ejkernel_eqx.recurrence.triton.key_scores import fold, gates
from tests.recurrence.kernels import check, CHUNK, config, interpreted, run

SLOW = pytest.mark.slow
QUICK = {"lightning", "kda", "dplr"}


def listed(case: Case) -> Any:
    mixes = case.delta or case.rank_one is not None
    tiles = config(32, 32, 32) if mixes else config(32) if case.decay == KEY else config(64, 32, 32)
    return pytest.param(case, tiles, id=case.name, marks=() if case.name in QUICK else SLOW)


@pytest.mark.parametrize(
    "case, tiles",
    [
        listed(case)
        for case in (*CASES, *DPLR, *BEFORE)
        if case.decay != VALUE and not (case.delta and case.skip)
    ],
)
def test_agrees_with_the_recurrence(case, tiles):
    check(case, tiles)


SMALL = Case(B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=16, V=16, initial_state=True)
KINDS: dict[str, dict[str, Any]] = {
    "constant": dict(decay=CONSTANT, beta=1.0),
    "scalar": dict(decay=SCALAR, beta=1.0),
    "key": dict(decay=KEY, log_decays="mixed"),
    "delta": dict(decay=SCALAR, delta=True, beta=2.0),
    "kda": dict(decay=KEY, delta=True, beta=2.0),
    "dplr": dict(decay=KEY, rank_one=1.0),
}
LONG: dict[str, Any] = dict(T=5 * CHUNK + 3)
# Changes of a problem, the kinds that they are tried on, and changes of the tiles.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "one token": (dict(T=1), "key delta dplr"),
    "15 tokens": (dict(T=CHUNK - 1), "delta key"),
    "17 tokens": (dict(T=CHUNK + 1), "scalar key dplr"),
    "no decay": (dict(log_decays=0.0), "constant kda dplr"),
    "slow": (dict(log_decays=-1e-6), "scalar constant key"),
    "strong": (dict(log_decays=-50.0, B=2, Hv=2, Hg=2), "kda constant dplr"),
    "mixed": (dict(log_decays="mixed"), "scalar kda dplr"),
    "bfloat16": (dict(dtype="bfloat16"), "key kda dplr"),
    "float16": (dict(dtype="float16"), "scalar key dplr"),
    "segments": (dict(B=2, packing="segments"), "scalar kda dplr"),
    "offsets": (dict(B=2, packing="offsets"), "constant kda dplr"),
    "many sequences": (dict(T=CHUNK + 3, packing="many"), "scalar delta dplr"),
    "few states": (dict(Hq=4, Hk=2, Hv=2, Hb=2), "delta key"),
    "odd heads": (dict(Hq=2, Hk=3, Hv=6, Hg=3, Hb=2), "scalar kda dplr"),
    "tiles that do not divide": (dict(T=CHUNK + 3, D=40, V=24), "key kda dplr"),
    "skip": (dict(D=24, skip=True), "scalar key"),
    "one kernel": (dict(D=24, V=24, skip=True), "scalar constant", dict(single=True)),
    "one kernel, segments": (dict(B=2, packing="segments", dtype="bfloat16"), "scalar", dict(single=True)),
    "one kernel, offsets": (dict(Hq=2, packing="offsets"), "constant", dict(single=True)),
    "one kernel, closed": (dict(log_decays="closed"), "constant scalar", dict(single=True)),
    "splits": (LONG, "delta scalar key dplr", dict(splits=4)),
    "splits and tiles": (dict(T=7 * CHUNK, D=40, V=24), "kda scalar", dict(splits=4)),
    "splits, segments": (dict(B=2, packing="segments", **LONG), "key kda dplr", dict(splits=4)),
    "splits, offsets": (dict(B=2, packing="offsets", **LONG), "constant delta", dict(splits=4)),
    "reads before": (dict(before=True, packing="offsets"), "dplr key scalar"),
    "splits, offsets, mixed": (
        dict(B=2, packing="offsets", log_decays="mixed", **LONG),
        "dplr kda",
        dict(splits=4),
    ),
    "splits, many": (dict(T=CHUNK + 3, packing="many"), "scalar delta", dict(splits=4)),
    "splits, mixed": (dict(log_decays="mixed", dtype="bfloat16", **LONG), "scalar delta", dict(splits=4)),
    "splits, closed": (dict(log_decays="closed", **LONG), "constant kda dplr", dict(splits=4)),
    "splits, one kernel": (dict(packing="segments", **LONG), "scalar constant", dict(splits=4, single=True)),
}
# These, of the first kind, by default.
DEFAULT = ("one token", "strong", "bfloat16", "segments", "offsets", "odd heads")
DEFAULT += (
    "tiles that do not divide",
    "one kernel, closed",
    "splits",
    "splits, segments",
    "splits, offsets, mixed",
    "reads before",
)


@pytest.mark.parametrize(
    "variant, kind",
    [
        pytest.param(name, kind, marks=() if name in DEFAULT and n == 0 else SLOW)
        for name, (_, kinds, *_) in VARIANTS.items()
        for n, kind in enumerate(kinds.split())
    ],
)
def test_variants(variant, kind):
    """Splits are of several chunks, of one, and of none; the state passes through all of them."""
    changes, _, *tiles = VARIANTS[variant]
    of = {"T": 2 * CHUNK + 3} | KINDS[kind] | changes
    check(dataclasses.replace(SMALL, **of), dataclasses.replace(config(), **(tiles[0] if tiles else {})))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("decay, delta", [(SCALAR, False), (KEY, False), (SCALAR, True)])
def test_no_tokens(decay, delta, splits):
    case = dataclasses.replace(EMPTY[0], decay=decay, delta=delta)
    check(case, dataclasses.replace(config(), splits=splits))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CLOSED if case.decay != VALUE], ids=lambda case: case.name)
def test_closed_gates(case, dtype):
    """Of all members: they share where decays are read."""
    check(dataclasses.replace(case, dtype=dtype), config())


SCALARS = dataclasses.replace(SMALL, **KINDS["scalar"])
REACH = {
    "one a token": dict(T=22 * CHUNK + 3, log_decays=-6.0),
    "packed": dict(T=22 * CHUNK + 3, log_decays=-8.0, decay=CONSTANT, packing="offsets"),
    "constant": dict(T=24 * CHUNK, log_decays=-5.0, decay=CONSTANT),
    "mixed": dict(T=22 * CHUNK, log_decays="mixed", packing="segments"),
    "bfloat16": dict(T=24 * CHUNK, log_decays=-6.0, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "one a token" else SLOW) for n in REACH])
def test_splits_longer_than_the_reach_of_their_tokens(name, monkeypatch):
    """In several blocks of chunks and several pieces; what has decayed to nothing before the edge of its split changes no number beyond it."""
    monkeypatch.setattr(reach, "BLOCK", tl.constexpr(2))
    monkeypatch.setattr(splitting, "LEAST_PIECE", 2)
    case, splits = dataclasses.replace(SCALARS, **REACH[name]), dataclasses.replace(config(), splits=4)
    check(case, splits)
    if case.packing is not None:
        return
    arrays, spec = make(case)
    edge = 6 * CHUNK  # of the first split
    forward = lambda v: interpreted.forward(arrays._replace(v=v), spec, splits)["out"]
    poisoned = forward(arrays.v.at[:, 0].set(np.inf))
    assert not np.isfinite(np.asarray(poisoned[:, edge - 1], np.float32)).any()
    np.testing.assert_array_equal(poisoned[:, edge:], forward(arrays.v)[:, edge:])


@pytest.mark.few(1)
@pytest.mark.parametrize("decay, packing", [(SCALAR, None), (SCALAR, "segments"), (CONSTANT, "offsets")])
def test_splits_in_pieces_that_all_count(decay, packing, monkeypatch):
    monkeypatch.setattr(splitting, "LEAST_PIECE", 2)
    case = dataclasses.replace(SCALARS, T=22 * CHUNK + 3, decay=decay, packing=packing, log_decays=-0.01)
    check(case, dataclasses.replace(config(), splits=3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scalar", "key", "delta", "delta by key"])
def test_pullbacks_of_splits(kind):
    """What the forward pass keeps of splits serves a pullback, also a mapped one."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, g = (jax.random.normal(key, (2, 5 * CHUNK + 3, 2, 16)) / 4 for key in keys[:4])
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], q.shape[:-1]))
    cotangents = jax.random.normal(keys[5], (3, *v.shape))
    g = -jax.nn.softplus(g if "key" in kind else g[..., 0])
    if "delta" in kind:
        operation = ejx.KernelDeltaAttention if "key" in kind else ejx.GatedDeltaRule
    else:
        operation = ejx.GatedLinearAttention if "key" in kind else ejx.LinearAttention
    more = {"beta": beta} if "delta" in kind else {}

    def gradients(**options):
        attend = operation(**options)
        _, pull = jax.vjp(lambda q: attend(q, k, v, g=g, **more)[0], q)
        return pull(cotangents[0])[0], jax.vmap(lambda x: pull(x)[0])(cotangents)

    mine = gradients(platform="triton-interpret", config=dataclasses.replace(config(), splits=3))
    for x, y in zip(mine, gradients(platform="xla"), strict=True):
        assert_close(x, y, "float32")


SHARED = dataclasses.replace(SCALARS, T=CHUNK + 3, D=24, Hv=4, Hg=4, Hb=4, skip=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        SHARED,
        dataclasses.replace(SHARED, B=2, T=3 * CHUNK + 3, V=40, packing="segments"),
        dataclasses.replace(SHARED, B=2, T=2 * CHUNK + 3, packing="offsets", decay=CONSTANT),
        dataclasses.replace(SHARED, decay=NONE, beta=None, skip=False),
        dataclasses.replace(SHARED, T=2 * CHUNK, Hq=2, Hv=8, Hg=2, Hb=1, dtype="bfloat16"),
        dataclasses.replace(SHARED, T=2 * CHUNK + 3, log_decays="mixed"),
    ],
    ids=["one a token", "segments", "packed", "none", "groups", "mixed"],
)
def test_heads_that_share_keys_run_together(case, monkeypatch):
    """In one sum, and in several that are added."""
    monkeypatch.setattr(linear_host, "_PARTS", 1 if case.Hv == 4 else 2)
    monkeypatch.setattr(shared_host, "_PROGRAMS", 8)
    check(case, config())


def test_one_chunk_of_every_kind():
    """Channels of one chunk in tiles of their own: the gates of a tile decide how it is computed."""
    case = dataclasses.replace(SMALL, T=32, D=48, decay=KEY, log_decays=-1e-6)
    arrays, spec = make(case)
    rates = jnp.repeat(jnp.asarray([-0.01, -20.0, -3.0]), 16)
    g = jnp.broadcast_to(rates, jnp.shape(arrays.g))  # pyright: ignore[reportArgumentType]
    call = make_call(arrays._replace(g=g), spec, config(32))
    of_call = lambda: fold(call, gates(call), scores=True).launch.arrays["scores"]
    scores = executed(of_call, functools.partial(run, interpret=True))()
    q, k = (np.asarray(x, np.float64)[0, :, 0] for x in (arrays.q, arrays.k))
    tokens = np.arange(case.T)
    age = (tokens[:, None] - tokens)[..., None]
    decay = np.where(age >= 0, np.exp(np.asarray(rates, np.float64) * np.maximum(age, 0)), 0.0)
    expected = spec.scale * np.einsum("id,jd,ijd->ij", q, k, decay)
    assert_close(np.asarray(scores)[0, :, 0], expected, "float32", name="scores")
