"""The Triton kernels of the delta rules, interpreted."""

import dataclasses

import jax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.recurrence.spec import CONSTANT, KEY, NONE, SCALAR
from tests.recurrence.cases import Case, CASES, EMPTY
from tests.tolerances import assert_close

pytest.importorskip("triton")
from tests.recurrence.test_triton_linear import check, CHUNK, config

MINE = [
    case for case in CASES if case.delta and not case.skip and case.decay in (NONE, CONSTANT, SCALAR, KEY)
]
QUICK = {"delta", "gated-delta", "kda", "kda-mixed"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in MINE],
)
def test_agrees_with_the_recurrence(case):
    check(case, config(32, 32, 32))


SMALL = Case(
    B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, D=16, V=16, decay=SCALAR, delta=True, beta=2.0, initial_state=True
)


@pytest.mark.few(2)
@pytest.mark.parametrize("decay", [SCALAR, KEY])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_any_length(decay, length):
    check(dataclasses.replace(SMALL, T=length, decay=decay), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [CONSTANT, SCALAR, KEY])
@pytest.mark.parametrize("log_decay", [0.0, -50.0, "mixed"])
def test_any_decay(decay, log_decay):
    # Several heads: a constant's gradient is one number for each, which may be small by chance.
    heads = {name: 2 for name in ("B", "Hv", "Hg")}
    check(dataclasses.replace(SMALL, T=2 * CHUNK + 3, decay=decay, log_decays=log_decay, **heads), config())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("decay", "packing"), [(SCALAR, "segments"), (KEY, "segments"), (CONSTANT, "offsets"), (KEY, "offsets")]
)
def test_packed(decay, packing):
    check(dataclasses.replace(SMALL, B=2, T=2 * CHUNK + 3, decay=decay, packing=packing), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [SCALAR, KEY])
@pytest.mark.parametrize("heads", [(1, 1, 4, 4, 4), (4, 2, 2, 1, 2), (2, 3, 6, 3, 2)])
def test_head_groups(decay, heads):
    names = dict(zip(("Hq", "Hk", "Hv", "Hg", "Hb"), heads))
    check(dataclasses.replace(SMALL, T=CHUNK + 1, decay=decay, **names), config())


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [SCALAR, KEY])
def test_tiles_that_do_not_divide(decay):
    check(dataclasses.replace(SMALL, T=CHUNK + 3, decay=decay, D=40, V=24), config())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(SMALL, T=5 * CHUNK + 3),
        dataclasses.replace(SMALL, T=7 * CHUNK, decay=KEY, D=40, V=24),
        dataclasses.replace(SMALL, B=2, T=5 * CHUNK + 3, packing="offsets", decay=CONSTANT),
        dataclasses.replace(SMALL, B=2, T=5 * CHUNK + 3, packing="segments", decay=KEY),
        dataclasses.replace(SMALL, T=CHUNK + 3, packing="many"),
        dataclasses.replace(SMALL, T=6 * CHUNK, decay=NONE, initial_state=False, Hv=2),
        dataclasses.replace(SMALL, T=5 * CHUNK + 3, log_decays="mixed", dtype="bfloat16"),
        dataclasses.replace(SMALL, T=5 * CHUNK + 3, log_decays=-50.0, decay=KEY),
        EMPTY[2],
    ],
    ids=["one a token", "channels", "packed", "segments", "many", "none", "mixed", "closed", "no tokens"],
)
def test_sequences_in_splits(case):
    """Splits of several chunks, of one, and of none; the state passes through all of them."""
    check(case, dataclasses.replace(config(), splits=4))


@pytest.mark.parametrize("case", EMPTY[2:], ids=lambda case: case.name)
def test_no_tokens(case):
    check(case, config())


@pytest.mark.slow
@pytest.mark.parametrize("operation", [ejx.GatedDeltaRule, ejx.KernelDeltaAttention])
def test_pullbacks_of_splits(operation):
    """What the forward pass keeps of splits serves a pullback, also a mapped one."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, g = (jax.random.normal(key, (2, 5 * CHUNK + 3, 2, 16)) / 4 for key in keys[:4])
    g, beta = -jax.nn.softplus(g), jax.nn.sigmoid(jax.random.normal(keys[4], q.shape[:-1]))
    cotangents = jax.random.normal(keys[5], (3, *v.shape))

    def gradients(**options):
        attend = operation(**options)
        gates = g[..., 0] if operation is ejx.GatedDeltaRule else g
        _, pull = jax.vjp(lambda q: attend(q, k, v, gates, beta)[0], q)
        return pull(cotangents[0])[0], jax.vmap(lambda x: pull(x)[0])(cotangents)

    mine = gradients(platform="triton-interpret", config=dataclasses.replace(config(), splits=3))
    for x, y in zip(mine, gradients(platform="xla"), strict=True):
        assert_close(x, y, "float32")
