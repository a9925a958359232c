"""The Triton kernels of the linear members without decay, with a constant one and with one a token, interpreted."""

import dataclasses

import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.recurrence.spec import CONSTANT, NONE, RecurrenceArrays, SCALAR, VALUE
from tests.recurrence.cases import (
    assert_agrees,
    Case,
    CASES,
    CLOSED,
    cotangents,
    EMPTY,
    floats_of,
    in_sequence,
    make,
    Result,
    run_reference,
)
from tests.tolerances import assert_close

pytest.importorskip("triton")
import triton.language as tl

from ejkernel_eqx.recurrence.triton import interpreted as triton_interpret
from ejkernel_eqx.recurrence.triton import linear_host, reach, shared_host
from ejkernel_eqx.recurrence.triton import splits as splitting
from ejkernel_eqx.recurrence.triton.tile_sizes import Tile, TritonConfig

CHUNK = 16


def config(chunk: int = CHUNK, block_k: int = 16, block_v: int = 16) -> TritonConfig:
    return TritonConfig(chunk, *[Tile(block_k, block_v, 4, 1)] * 6, float32_dot="ieee")


def run(case: Case, config: TritonConfig) -> Result:
    arrays, spec = make(case)
    dout, dstate = cotangents(case)
    results = dict(triton_interpret.platform.forward(arrays, spec, config))
    out, final = results.pop("out"), results.pop("final_state")
    grads = triton_interpret.platform.backward(
        arrays, spec, config, results, {"out": dout, "final_state": dstate}
    )
    cast = {name: grads[name].astype(x.dtype) for name, x in floats_of(arrays).items()}
    return Result(out, final, {name: _where_seen(case, arrays, name, x) for name, x in cast.items()})


def _where_seen(case: Case, arrays: RecurrenceArrays, name: str, grad: jax.Array) -> np.ndarray:
    """What a kernel gives for tokens of no sequence counts as zero: the caller masks it."""
    x = np.asarray(grad)
    if (
        arrays.offsets is None
        or name in ("skip", "initial_state")
        or (name == "g" and case.decay == CONSTANT)
    ):
        return x
    tokens, offsets = np.arange(case.T), np.asarray(arrays.offsets)
    seen = (tokens >= offsets[:, :1]) & (tokens < offsets[:, -1:])
    return np.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, np.zeros((), x.dtype))


def check(case: Case, config: TritonConfig) -> None:
    arrays, spec = make(case)
    assert_agrees(case, run(case, config), run_reference(arrays, *cotangents(case), spec))


MINE = [case for case in CASES if not case.delta and case.decay in (NONE, CONSTANT, SCALAR)]
QUICK = {"linear", "lightning", "ssd", "scalar-mixed"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in MINE],
)
def test_agrees_with_the_recurrence(case):
    check(case, config(64, 32, 32))


SMALL = Case(B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=16, V=16, decay=SCALAR, beta=1.0, initial_state=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("length", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_any_length(length):
    check(dataclasses.replace(SMALL, T=length), config())


@pytest.mark.few(4)
@pytest.mark.parametrize("decay", [CONSTANT, SCALAR])
@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -1.0, -50.0])
def test_any_decay(decay, log_decay):
    check(dataclasses.replace(SMALL, T=2 * CHUNK + 3, decay=decay, log_decays=log_decay), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CLOSED if case.decay != VALUE], ids=lambda case: case.name)
def test_closed_gates(case, dtype):
    """Of all members: they share where decays are read."""
    check(dataclasses.replace(case, dtype=dtype), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", ["segments", "offsets", "many"])
def test_packed(packing):
    length = CHUNK + 3 if packing == "many" else 2 * CHUNK + 3
    packed = dataclasses.replace(SMALL, B=1 if packing == "many" else 2, T=length, packing=packing)
    check(packed if packing == "segments" else dataclasses.replace(packed, decay=CONSTANT), config())


@pytest.mark.parametrize("case", EMPTY[:1], ids=lambda case: case.name)
def test_no_tokens(case):
    check(case, config())


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [(1, 1, 4, 4, 4), (2, 1, 4, 2, 1), (4, 2, 2, 1, 2), (2, 3, 6, 3, 2)])
def test_head_groups(heads):
    names = dict(zip(("Hq", "Hk", "Hv", "Hg", "Hb"), heads))
    check(dataclasses.replace(SMALL, T=CHUNK + 1, skip=heads[2] == max(heads), **names), config())


def test_tiles_that_do_not_divide():
    """More tiles of keys and values than one, the last of them in part beyond the end."""
    check(dataclasses.replace(SMALL, T=CHUNK + 3, D=40, V=24, skip=True), config())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(SMALL, T=CHUNK + 3, D=24, V=24, skip=True),
        dataclasses.replace(SMALL, B=2, T=2 * CHUNK + 3, packing="segments", dtype="bfloat16"),
        dataclasses.replace(SMALL, T=2 * CHUNK + 3, packing="offsets", decay=CONSTANT, Hq=2),
        dataclasses.replace(SMALL, T=2 * CHUNK, decay=CONSTANT, log_decays=-0.3),
        dataclasses.replace(SMALL, T=CHUNK + 1, log_decays="mixed"),
        dataclasses.replace(CLOSED[0], T=2 * CHUNK),
        CLOSED[1],
    ],
    ids=["one a token", "segments", "packed", "constant", "mixed", "constant, closed", "closed"],
)
def test_the_forward_pass_in_one_kernel(case):
    arrays, spec = make(case)
    results = triton_interpret.platform.forward(arrays, spec, dataclasses.replace(config(), single=True))
    exact = run_reference(arrays, *cotangents(case), spec)
    seen = in_sequence(case, arrays)
    assert_close(
        np.where(seen, np.asarray(results["out"]).astype(np.float64), 0),
        np.where(seen, exact.out, 0),
        case.dtype,
    )
    assert_close(results["final_state"], exact.final_state, case.dtype)


@pytest.mark.few(2)
@pytest.mark.parametrize("single", [False, True], ids=["phases", "one kernel"])
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(SMALL, T=5 * CHUNK + 3, D=24, V=24, skip=True),
        dataclasses.replace(SMALL, B=2, T=5 * CHUNK + 3, packing="segments"),
        dataclasses.replace(SMALL, B=2, T=5 * CHUNK + 3, packing="offsets", decay=CONSTANT),
        dataclasses.replace(SMALL, T=CHUNK + 3, packing="many"),
        dataclasses.replace(SMALL, T=7 * CHUNK, decay=NONE, beta=None),
        dataclasses.replace(SMALL, T=5 * CHUNK + 3, log_decays="mixed", dtype="bfloat16"),
        dataclasses.replace(CLOSED[0], T=4 * CHUNK),
        EMPTY[0],
    ],
    ids=["one a token", "segments", "packed", "many", "none", "mixed", "closed", "no tokens"],
)
def test_sequences_in_splits(case, single):
    """Splits of several chunks, of one, and of none; the state passes through all of them."""
    check(case, dataclasses.replace(config(), splits=4, single=single))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(SMALL, T=22 * CHUNK + 3, log_decays=-6.0),
        dataclasses.replace(SMALL, T=24 * CHUNK, log_decays=-5.0, decay=CONSTANT),
        dataclasses.replace(SMALL, T=22 * CHUNK + 3, log_decays=-8.0, decay=CONSTANT, packing="offsets"),
        dataclasses.replace(SMALL, T=22 * CHUNK, log_decays="mixed", packing="segments"),
        dataclasses.replace(SMALL, T=24 * CHUNK, log_decays=-6.0, dtype="bfloat16"),
    ],
    ids=["one a token", "constant", "packed", "mixed", "bfloat16"],
)
def test_splits_longer_than_the_reach_of_their_tokens(case, monkeypatch):
    """In several blocks of chunks and several pieces; what has decayed to nothing before the edge of its split changes no number beyond it."""
    monkeypatch.setattr(reach, "BLOCK", tl.constexpr(2))
    monkeypatch.setattr(splitting, "LEAST_PIECE", 2)
    splits = dataclasses.replace(config(), splits=4)
    check(case, splits)
    if case.packing is not None:
        return
    arrays, spec = make(case)
    edge = 6 * CHUNK  # of the first split
    forward = lambda v: triton_interpret.platform.forward(arrays._replace(v=v), spec, splits)["out"]
    poisoned = forward(arrays.v.at[:, 0].set(np.inf))
    assert not np.isfinite(np.asarray(poisoned[:, edge - 1], np.float32)).any()
    np.testing.assert_array_equal(poisoned[:, edge:], forward(arrays.v)[:, edge:])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(SMALL, T=22 * CHUNK + 3, log_decays=-0.01, skip=True),
        dataclasses.replace(SMALL, T=23 * CHUNK, log_decays=-0.01, packing="segments"),
        dataclasses.replace(SMALL, T=22 * CHUNK + 3, log_decays=-0.01, decay=CONSTANT, packing="offsets"),
    ],
    ids=["one a token", "segments", "packed"],
)
def test_splits_in_pieces_that_all_count(case, monkeypatch):
    monkeypatch.setattr(splitting, "LEAST_PIECE", 2)
    check(case, dataclasses.replace(config(), splits=3))


@pytest.mark.slow
@pytest.mark.parametrize("operation", [ejx.LinearAttention, ejx.GatedLinearAttention])
def test_pullbacks_of_splits(operation):
    """What the forward pass keeps of splits serves a pullback, also a mapped one."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (2, 5 * CHUNK + 3, 2, 16)) for key in keys[:4])
    g = -jax.nn.softplus(g) / 4
    cotangents = jax.random.normal(keys[4], (3, *v.shape))

    def gradients(**options):
        attend = operation(**options)
        gates = g[..., 0] if operation is ejx.LinearAttention else g
        _, pull = jax.vjp(lambda q: attend(q, k, v, g=gates)[0], q)
        return pull(cotangents[0])[0], jax.vmap(lambda x: pull(x)[0])(cotangents)

    mine = gradients(platform="triton-interpret", config=dataclasses.replace(config(), splits=3))
    for x, y in zip(mine, gradients(platform="xla"), strict=True):
        assert_close(x, y, "float32")


SHARED = dataclasses.replace(SMALL, T=CHUNK + 3, D=24, Hv=4, Hg=4, Hb=4, skip=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        SHARED,
        dataclasses.replace(SHARED, B=2, T=3 * CHUNK + 3, V=40, packing="segments"),
        dataclasses.replace(SHARED, B=2, T=2 * CHUNK + 3, packing="offsets", decay=CONSTANT),
        dataclasses.replace(SHARED, decay=NONE, beta=None, skip=False),
        dataclasses.replace(SHARED, T=2 * CHUNK, Hq=2, Hv=8, Hg=2, Hb=1, dtype="bfloat16"),
        dataclasses.replace(SHARED, T=2 * CHUNK + 3, log_decays="mixed"),
        dataclasses.replace(SHARED, T=CHUNK + 3, log_decays=-50.0),
    ],
    ids=["one a token", "segments", "packed", "none", "groups", "mixed", "strong"],
)
def test_heads_that_share_keys_run_together(case, monkeypatch):
    """In one sum, and in several that are added."""
    monkeypatch.setattr(linear_host, "_PARTS", 1 if case.Hv == 4 else 2)
    monkeypatch.setattr(shared_host, "_PROGRAMS", 8)
    check(case, config())
