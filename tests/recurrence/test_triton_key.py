"""The Triton kernels of the linear members with a decay per key channel, interpreted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.recurrence.spec import KEY
from tests.recurrence.cases import Case, CASES, EMPTY, LOG_DECAYS, make
from tests.recurrence.test_triton_linear import check, config
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.launch import run
from ejkernel_eqx.recurrence.triton.call import make_call
from ejkernel_eqx.recurrence.triton.key_scores import fold, gates

CHUNK = 16
MINE = [case for case in CASES if case.decay == KEY and not case.delta]
SMALL = Case(B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=16, V=16, decay=KEY, log_decays="mixed", initial_state=True)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in MINE],
)
def test_agrees_with_the_recurrence(case):
    check(case, config(32))


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("log_decays", ["usual", "mixed", *LOG_DECAYS])
def test_any_decay(log_decays, dtype):
    """Chunks of four levels of halves; what decays and what does not meet in one."""
    check(dataclasses.replace(SMALL, T=2 * CHUNK + 3, log_decays=log_decays, dtype=dtype), config())


@pytest.mark.few(2)
@pytest.mark.parametrize("length", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1])
def test_any_length(length):
    check(dataclasses.replace(SMALL, T=length, log_decays="usual"), config())
    check(dataclasses.replace(SMALL, T=length, log_decays=-50.0), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", ["segments", "offsets", "many"])
def test_packed(packing):
    length = 5 if packing == "many" else 2 * CHUNK + 3
    check(dataclasses.replace(SMALL, B=2, T=length, packing=packing), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", [None, "segments", "offsets"])
def test_sequences_in_splits(packing):
    case = dataclasses.replace(SMALL, B=2, T=5 * CHUNK + 3, packing=packing)
    check(case, dataclasses.replace(config(), splits=4))


def test_no_tokens():
    check(dataclasses.replace(EMPTY[0], decay=KEY), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [(4, 1, 2, 2, 1), (2, 3, 6, 3, 2)])
def test_head_groups(heads):
    """Write strength and skip, which these kernels leave to the host, too."""
    names = dict(zip(("Hq", "Hk", "Hv", "Hg", "Hb"), heads))
    check(dataclasses.replace(SMALL, T=CHUNK + 1, beta=1.0, skip=heads[2] == max(heads), **names), config())


def test_tiles_that_do_not_divide():
    """More tiles of keys and values than one, the last of them in part beyond the end."""
    check(dataclasses.replace(SMALL, T=CHUNK + 3, D=40, V=24), config())


def test_one_chunk_of_every_kind():
    """Channels of one chunk in tiles of their own: the gates of a tile decide how it is computed."""
    case = dataclasses.replace(SMALL, T=32, D=48, log_decays=-1e-6)
    arrays, spec = make(case)
    rates = jnp.repeat(jnp.asarray([-0.01, -20.0, -3.0]), 16)
    g = jnp.broadcast_to(rates, jnp.shape(arrays.g))  # pyright: ignore[reportArgumentType]
    call = make_call(arrays._replace(g=g), spec, config(32), lambda *x: run(*x, interpret=True))
    _, scores = fold(call, *gates(call), scores=True)
    q, k = (np.asarray(x, np.float64)[0, :, 0] for x in (arrays.q, arrays.k))
    tokens = np.arange(case.T)
    age = (tokens[:, None] - tokens)[..., None]
    decay = np.where(age >= 0, np.exp(np.asarray(rates, np.float64) * np.maximum(age, 0)), 0.0)
    expected = spec.scale * np.einsum("id,jd,ijd->ij", q, k, decay)
    assert_close(np.asarray(scores)[0, :, 0], expected, "float32", name="scores")
