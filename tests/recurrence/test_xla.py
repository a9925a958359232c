import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.dispatch import Problem
from ejkernel_eqx.recurrence import reference, xla
from ejkernel_eqx.recurrence.spec import (
    CONSTANT,
    KEY,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
    StepArrays,
    StepSpec,
    VALUE,
)
from ejkernel_eqx.recurrence.xla import XlaConfig
from tests.recurrence.cases import (
    assert_agrees,
    Case,
    CLOSED,
    cotangents,
    differentiated,
    EMPTY,
    HARD,
    in_sequence,
    make,
    MEMBERS,
    PAIRWISE,
    Result,
    run_reference,
)
from tests.tolerances import assert_close

# Half the time in the compiler, for the long list of cases.
MEMBER = {case.name: case for case in MEMBERS}


def _run(arrays: RecurrenceArrays, dout, dstate, spec: RecurrenceSpec, config: XlaConfig) -> Result:
    return differentiated(lambda arrays: xla.apply(arrays, spec, config), arrays, dout, dstate)


run = jax.jit(_run, static_argnums=(3, 4))
forward = jax.jit(xla.apply, static_argnums=(1, 2))


def check(case: Case, size: int) -> None:
    arrays, spec = make(case)
    given = cotangents(case)
    assert_agrees(case, run(arrays, *given, spec, XlaConfig(size)), run_reference(arrays, *given, spec))


def _listed():
    """A few of the long list always, all of it when asked for."""
    covered = {
        "linear",
        "scalar",
        "delta",
        "delta-correlated",
        "gla-mixed",
        "scalar-strong",
    }  # by others like them
    for n, case in enumerate([*MEMBERS, *HARD]):
        marks = [pytest.mark.slow] if case.name in covered else []
        yield pytest.param(case, 64 >> 2 * (n % 2), id=case.name, marks=marks)
    for n, case in enumerate(PAIRWISE):
        marks = [] if n % 16 == 3 else [pytest.mark.slow]
        yield pytest.param(case, (64, 16, 32)[n % 3], id=case.name, marks=marks)


@pytest.mark.few(1)
@pytest.mark.parametrize("case, size", [*_listed()])
def test_agrees_with_reference(case, size):
    check(case, size)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=pytest.mark.slow if case.name in ("ssd-closed", "gla-closed") else ()
        )
        for case in CLOSED
    ],
)
def test_closed_gates(case):
    check(case, 16)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_empty(case):
    check(case, 64)


def test_no_sequences():
    arrays, spec = make(Case(B=1, T=5))
    arrays = arrays._replace(offsets=jnp.full((1, 1), 3, jnp.int32))
    out, state = xla.apply(arrays, spec, XlaConfig(16))
    assert state.shape == (1, 0, 2, 32, 32) and not out.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gated-delta", marks=pytest.mark.slow), "kda"])
def test_16_bits(name):
    check(dataclasses.replace(MEMBER[name], dtype="bfloat16", state_dtype="bfloat16", initial_state=True), 32)


@pytest.mark.slow
@pytest.mark.parametrize("decay, delta", [(KEY, True), (VALUE, True), (VALUE, False)])
def test_float64(decay, delta, enable_x64):
    case = Case(
        T=37,
        D=8,
        V=6,
        decay=decay,
        delta=delta,
        beta=2.0,
        keys="correlated",
        packing="segments",
        initial_state=True,
    )
    check(dataclasses.replace(case, dtype="float64", state_dtype="float64"), 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("ssd", marks=pytest.mark.slow), "kda"])
def test_any_length(name):
    size = 16
    case = dataclasses.replace(MEMBER[name], T=2 * size + 3, D=8, V=8, skip=False)
    arrays, spec = make(case)
    expected, _ = reference.recur(arrays, spec)
    for length in (1, 2, 3, size - 1, size, size + 1, 2 * size + 3):
        out, _ = forward(_rows(arrays, 0, length), spec, XlaConfig(size))
        assert_close(out, expected[:, :length], name=f"{length} tokens")


def _rows(arrays: RecurrenceArrays, first: int, end: int) -> RecurrenceArrays:
    """Some of the tokens."""
    cut = lambda x: x if x is None or x.ndim < 3 else x[:, first:end]
    return arrays._replace(
        q=cut(arrays.q), k=cut(arrays.k), v=cut(arrays.v), g=cut(arrays.g), beta=cut(arrays.beta)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["ssd", "kda", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lightning", "value"))]
)
def test_however_it_is_cut(name):
    """Whole, in two calls, packed, and token by token."""
    case = dataclasses.replace(MEMBER[name], B=1, T=41, D=8, V=12, initial_state=True)
    arrays, spec = make(case)
    config, split = XlaConfig(16), 19
    out, state = forward(arrays, spec, config)

    first, between = forward(_rows(arrays, 0, split), spec, config)
    second, last = forward(_rows(arrays, split, 41)._replace(initial_state=between), spec, config)
    assert_close(jnp.concatenate([first, second], 1), out)
    assert_close(last, state)

    assert arrays.initial_state is not None
    packed = arrays._replace(
        offsets=jnp.asarray([[0, split, split, 41]], jnp.int32),
        initial_state=jnp.stack([arrays.initial_state, between + 1, between], 1),
    )
    out_packed, states = forward(packed, spec, config)
    assert_close(out_packed, out)
    assert_close(states, jnp.stack([between, between + 1, state], 1))

    out_stepped, state_stepped = _stepped(arrays, spec)
    assert_close(out_stepped, out)
    assert_close(state_stepped, state)


@functools.partial(jax.jit, static_argnums=1)
def _stepped(arrays: RecurrenceArrays, spec: RecurrenceSpec):
    """The whole sequence by steps."""
    g, decay = arrays.g, spec.decay
    if decay == CONSTANT:
        assert g is not None
        g, decay = jnp.broadcast_to(g[:, None], (*arrays.q.shape[:2], g.shape[-1])), SCALAR
    step_spec = StepSpec(spec.scale, decay, spec.delta)

    def token(state, x):
        q, k, v, g, beta = x
        arrays_of_token = StepArrays(q, k, v, state, g, beta, None if arrays.skip is None else arrays.skip[0])
        out, state = xla.step(arrays_of_token, step_spec, XlaConfig(16))
        return state, out

    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (arrays.q, arrays.k, arrays.v, g, arrays.beta))
    state, out = jax.lax.scan(token, arrays.initial_state, xs)
    return jnp.moveaxis(out, 0, 1), state


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


@pytest.mark.slow
def test_vmap():
    """Over any leading axes, and heads in groups: XLA's libraries fail for arrays of too many axes."""
    case = Case(B=4, T=37, D=8, V=12, decay=VALUE, Hq=4, beta=1.0, initial_state=True)
    arrays, spec = make(case)
    given = cotangents(case)
    expected = run(arrays, *given, spec, XlaConfig(16))
    split = lambda x: x.reshape(2, 2, 1, *x.shape[1:])
    mapped = jax.vmap(jax.vmap(functools.partial(_run, spec=spec, config=XlaConfig(16))))
    actual = jax.jit(mapped)(*jax.tree.map(split, (arrays, *given)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a.reshape(b.shape), b, kind="gradient")


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
    temporary = []
    for length in (512, 1024):
        case = dataclasses.replace(MEMBER["kda"], B=1, T=length, D=128, V=128)
        arrays, spec = make(case)
        lowered = run.lower(arrays, *cotangents(case), spec, xla.default_config(_problem(length), None))
        analysis = optimised(lowered).memory_analysis()
        assert analysis is not None
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] < 2.2 * temporary[0], temporary
    state_a_token = 4 * 2 * 1024 * 128 * 128
    assert temporary[1] < state_a_token / 3, temporary


def _problem(length: int) -> Problem:
    return Problem.make(
        "gated_linear_attention", dims={"T": length}, dtypes={"qkv": "float32"}, flags={}, lengths={"T"}
    )


COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
AXES = dict(q="b.h.", k="b.h.", v="b.h.", beta="b.h", initial_state="bh..")


@pytest.mark.slow
@pytest.mark.parametrize("axis_type, decay", [(AxisType.Auto, SCALAR), (AxisType.Explicit, KEY)])
def test_sharding_moves_no_operand(axis_type, decay):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type, axis_type))
    case = Case(
        B=4,
        T=21,
        D=8,
        V=16,
        Hq=8,
        Hk=4,
        Hv=8,
        Hg=8,
        Hb=8,
        decay=decay,
        delta=True,
        beta=1.0,
        initial_state=True,
    )
    arrays, spec = make(case)
    dout, dstate = cotangents(case)
    expected = run(arrays, dout, dstate, spec, XlaConfig(16))

    def place(x, letters):
        spec = P(*({"b": "data", "h": "model"}.get(letter) for letter in letters))
        return jax.device_put(x, NamedSharding(mesh, spec))

    axes = AXES | {"g": "b.h" if decay == SCALAR else "b.h."}
    sharded = arrays._replace(
        **{name: place(getattr(arrays, name), letters) for name, letters in axes.items()}
    )
    dout, dstate = place(dout, "b.h."), place(dstate, "bh..")
    with jax.set_mesh(mesh):
        text = run.lower(sharded, dout, dstate, spec, XlaConfig(16)).compile().as_text() or ""
        actual = run(sharded, dout, dstate, spec, XlaConfig(16))
    found = collections.Counter(COLLECTIVE.findall(text))
    assert not found, found
    assert actual.out.sharding.is_equivalent_to(sharded.q.sharding, 4)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, kind="gradient")


def test_inside_shard_map():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    case = Case(B=2, T=21, D=8, V=8, Hq=4, Hk=4, Hv=4, Hg=4, decay=KEY)
    arrays, spec = make(case)
    rows: Any = P("data", None, "model")
    mapped = jax.shard_map(
        lambda q, k, v, g: xla.apply(RecurrenceArrays(q, k, v, g), spec, XlaConfig(16)),
        mesh=mesh,
        in_specs=(rows, rows, rows, rows),
        out_specs=(rows, P("data", "model")),
    )
    actual = jax.jit(mapped)(arrays.q, arrays.k, arrays.v, arrays.g)
    for a, b in zip(actual, forward(arrays, spec, XlaConfig(16)), strict=True):
        assert_close(a, b)


STEPS = (
    dict(),
    dict(decay=SCALAR, Hk=1, Hv=4, Hg=4, Hq=1, skip=True, transposed=True),
    dict(decay=KEY, delta=True, beta=1.0, Hq=8, Hk=2, Hg=1, state="bfloat16"),
    dict(decay=VALUE, beta=1.0, Hq=2, slots=True),
    dict(decay=SCALAR, delta=True, beta=2.0, slots=True, transposed=True, lead=(3,)),
    dict(decay=KEY, delta=True, slots=True, skip=True, lead=(2, 1)),
    dict(decay=KEY, delta=True, beta=1.0, closed=True),
    dict(decay=SCALAR, closed=True),
)


def _step_problem(
    lead=(),
    decay="none",
    delta=False,
    beta=None,
    skip=False,
    transposed=False,
    slots=False,
    state="float32",
    closed=False,
    **heads,
):
    counts = {**dict(Hq=4, Hk=4, Hv=4, Hg=4, Hb=4), **heads}
    rows, dim, values, size = 5, 6, 7, 9 if slots else 5
    heads_of_state = max(
        n for name, n in counts.items() if name != "Hq" and not (name == "Hg" and decay == "none")
    )
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32)
    g = {
        "none": None,
        SCALAR: normal(rows, counts["Hg"]),
        KEY: normal(rows, counts["Hg"], dim),
        VALUE: normal(rows, counts["Hg"], values),
    }[decay]
    key = normal(rows, counts["Hk"], dim)
    indices = np.stack([rng.permutation(size)[:rows] for _ in range(int(np.prod(lead)))]).reshape(*lead, rows)
    indices[..., 1] = -1
    shape = (size, heads_of_state, *((values, dim) if transposed else (dim, values)))
    arrays = StepArrays(
        q=normal(rows, counts["Hq"], dim),
        k=key / jnp.linalg.norm(key, axis=-1, keepdims=True),
        v=normal(rows, counts["Hv"], values),
        state=normal(*shape).astype(state),
        g=None if g is None else jnp.where(closed & (g > 0.5), -jnp.inf, -(g**2)),
        beta=None if beta is None else beta * jax.nn.sigmoid(normal(rows, counts["Hb"])),
        skip=normal(heads_of_state, values) if skip else None,
        indices=jnp.asarray(indices, jnp.int32) if slots else None,
    )
    return arrays, StepSpec(0.5, decay, delta, transposed)


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", STEPS)
def test_step_agrees_with_reference(flags):
    arrays, spec = _step_problem(**flags)
    floats = {n: x for n, x in arrays._asdict().items() if x is not None and n != "indices"}

    def differentiate(step, floats, others):
        results, pull = jax.vjp(lambda floats: step(StepArrays(**floats, **others), spec), floats)
        return results, pull(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), results)
        )[0]

    others = {} if arrays.indices is None else {"indices": arrays.indices}
    actual = jax.jit(
        functools.partial(differentiate, lambda arrays, spec: xla.step(arrays, spec, XlaConfig(16)))
    )(floats, others)
    expected = jax.jit(functools.partial(differentiate, reference.step))(floats, others)
    (out, state), _ = actual
    assert out.dtype == arrays.v.dtype and state.dtype == arrays.state.dtype
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, a.dtype, kind="gradient")
    if arrays.indices is not None:
        assert not np.asarray(out)[np.asarray(arrays.indices) < 0].any()


@pytest.mark.parametrize("size", [0, -1, 48, True])
def test_config_is_validated(size):
    with pytest.raises(ValueError, match="chunk_size"):
        XlaConfig(size)


def test_candidates_fit_the_sequence():
    sizes = lambda length: [config.chunk_size for config in xla.candidates(_problem(length), None)]
    assert sizes(4096)[0] == xla.default_config(_problem(4096), None).chunk_size == 64
    assert max(sizes(20)) == 32 and sizes(1) == [1]
