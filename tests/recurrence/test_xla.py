"""XLA against the float64 reference, forward and all gradients; its memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recurrence.cases import (
    assert_agrees,
    Case,
    CASES,
    CLOSED,
    cotangents,
    differentiated,
    EMPTY,
    example_problem,
    HARD,
    in_sequence,
    KEY,
    make,
    NAMED,
    RANK_ONE,
    run_reference,
    SCALAR,
    VALUE,
    with_every_option,
)
from tests.recurrence.operations import xla
from tests.tolerances import assert_close

XlaConfig = xla.XlaConfig


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(arrays, dout, dstate, spec, config):
    return differentiated(lambda arrays: xla.apply(arrays, spec, config), arrays, dout, dstate)


def check(case: Case, size: int) -> None:
    arrays, spec = make(case)
    given = cotangents(case)
    assert_agrees(case, run(arrays, *given, spec, XlaConfig(size)), run_reference(arrays, *given, spec))


# By default every option; then what is hard, and what no other platform takes.
DEFAULT = with_every_option()
OTHERS = [*HARD, *(case for case in CASES if case.decay == VALUE or (case.delta and case.skip))]


@pytest.mark.parametrize(
    "case, size",
    [pytest.param(case, (64, 16, 32)[n % 3], id=case.name) for n, case in enumerate(DEFAULT)]
    + [
        pytest.param(case, 32, id=case.name, marks=pytest.mark.slow) for case in OTHERS if case not in DEFAULT
    ],
)
def test_agrees_with_reference(case, size):
    check(case, size)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [*CLOSED, *EMPTY], ids=lambda case: case.name)
def test_closed_gates_and_no_tokens(case):
    check(case, 16)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", RANK_ONE, ids=lambda case: case.name)
def test_rank_one_and_reads_before(case):
    check(case, 32)


def test_no_sequences():
    arrays, spec = make(Case(B=1, T=5))
    arrays = arrays._replace(offsets=jnp.full((1, 1), 3, jnp.int32))
    out, state = xla.apply(arrays, spec, XlaConfig(16))
    assert state.shape == (1, 0, 2, 32, 32) and not out.any()


def test_tokens_of_no_sequence_are_not_read():
    case = Case(B=1, T=40, decay=KEY, delta=True, beta=1.0, packing="offsets", initial_state=True)
    arrays, spec = make(case)
    given = cotangents(case)
    seen = jnp.asarray(in_sequence(case, arrays))
    assert not seen.all()
    hide = lambda x: jnp.where(seen.reshape(seen.shape[:2] + (1,) * (x.ndim - 2)), x, jnp.nan)
    poisoned = arrays._replace(**{name: hide(getattr(arrays, name)) for name in ("q", "k", "v", "g", "beta")})
    clean, again = (run(x, *given, spec, XlaConfig(16)) for x in (arrays, poisoned))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_strong_and_weak_decays_together():
    """A difference of two sums would lose the weak ones behind the strong."""
    case = Case(B=1, T=64, D=8, V=8, decay=SCALAR)
    arrays, spec = make(case)
    g = jnp.where(jnp.arange(64) % 16 == 0, -5000.0, -1e-3)[None, :, None] * jnp.ones((1, 1, 2))
    arrays = arrays._replace(g=g)
    of_keys = arrays._replace(g=jnp.broadcast_to(g[..., None], (1, 64, 2, 8)))
    given = cotangents(case)
    for problem in ((arrays, *given, spec), (of_keys, *given, dataclasses.replace(spec, decay=KEY))):
        actual, exact = run(*problem, XlaConfig(64)), run_reference(*problem)
        assert_close(actual.out, exact.out)
        for name, x in actual.grads.items():
            assert_close(x, exact.grads[name], kind="gradient", name=name)


def test_forward_mode_within_a_scan():
    """Three layers that share their arrays, differentiated forwards and backwards."""
    case = Case(B=1, T=20, D=8, V=8, decay=KEY, delta=True, beta=1.0)
    arrays, spec = make(case)

    def layers(v):
        body = lambda v, _: (xla.apply(arrays._replace(v=v), spec, XlaConfig(8))[0], None)
        return jax.lax.scan(body, v, None, length=3)[0]

    direction = jnp.cos(jnp.arange(arrays.v.size, dtype=jnp.float32)).reshape(arrays.v.shape)
    out, slope = jax.jit(lambda v, dv: jax.jvp(layers, (v,), (dv,)))(arrays.v, direction)
    gradient = jax.jit(jax.grad(lambda v: (layers(v) ** 2).sum() / 2))(arrays.v)
    np.testing.assert_allclose((gradient * direction).sum(), (out * slope).sum(), rtol=1e-4)


@pytest.mark.slow
def test_memory_is_linear_in_length(optimised):
    temporary, dim = [], 64
    for length in (512, 1024):
        case = dataclasses.replace(NAMED["kda"], B=1, T=length, D=dim, V=dim)
        arrays, spec = make(case)
        lowered = run.lower(arrays, *cotangents(case), spec, xla.default_config(_problem(length), None))
        analysis = optimised(lowered).memory_analysis()
        assert analysis is not None
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] < 2.2 * temporary[0], temporary
    state_a_token = 4 * 2 * 1024 * dim * dim
    assert temporary[1] < state_a_token / 2, temporary


def _problem(length: int) -> Any:
    return example_problem("gated_linear_attention", dict(T=length, H=2, D=8), "float32", {})


@pytest.mark.parametrize("size", [0, -1, 48, True])
def test_config_is_validated(size):
    with pytest.raises(ValueError, match="chunk_size"):
        XlaConfig(size)


def test_candidates_fit_the_sequence():
    sizes = lambda length: [config.chunk_size for config in xla.candidates(_problem(length), None)]
    assert sizes(4096)[0] == xla.default_config(_problem(4096), None).chunk_size == 64
    assert max(sizes(20)) == 32 and sizes(1) == [1]
