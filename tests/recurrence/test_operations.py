"""Every public operation in float64, values and all gradients, against its formula: options, states, packing, decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.recurrence.operations import CASES, FULL, PER_TOKEN
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

T = 11
pytestmark = pytest.mark.usefixtures("enable_x64")


def cases(*names):
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


full = cases(*FULL)
PRODUCT = "delta product gated"


def over_rows(case, function):
    """`function(ids, state, arrays)` of one row, for a batch of them."""
    axes = {name: 0 if name in PER_TOKEN else None for name in case.shapes}
    return jax.vmap(function, in_axes=(0, 0, axes))


def expected(case, arrays, state, ids, reverse=False):
    """What the formula gives for rows with these ids, run from either end."""
    flip = lambda x: jnp.flip(x, 0) if reverse else x

    def row(ids, state, arrays):
        arrays = {name: flip(x) if name in PER_TOKEN else x for name, x in arrays.items()}
        out, state = case.formula(flip(ids), state, **arrays)
        return flip(out), state

    return over_rows(case, row)(jnp.asarray(ids, jnp.int32), state, arrays)


def cotangents(results, seed=5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), results)


@functools.partial(quick, static_argnums=0)
def with_gradients(function, arrays, state, pulled):
    results, pull = jax.vjp(function, arrays, state)
    return results, pull(pulled)


def agree(call, formula, arrays, state, clean=None):
    """Results and gradients of `call` are those of `formula`, which sees the clean arrays; the gradients in the arrays are given back."""
    pulled = cotangents(jax.eval_shape(call, arrays, state))
    results, gradients = with_gradients(call, arrays, state, pulled)
    wanted = with_gradients(formula, arrays if clean is None else clean, state, pulled)
    for name, got, want in zip(("out", "state"), results, wanted[0], strict=True):
        jax.tree.map(lambda x, y, name=name: assert_close(x, y, name=name), got, want)
    for name, got in gradients[0].items():
        assert_close(got, wanted[1][0][name], kind="gradient", name=f"d{name}")
    jax.tree.map(lambda x, y: assert_close(x, y, kind="gradient", name="dstate"), gradients[1], wanted[1][1])
    return gradients[0]


@pytest.mark.few(1)
@cases(*CASES)
def test_values_and_gradients(case):
    module = case.module()
    arrays, state = case.make(2, T), case.make_state(2)
    ids = np.zeros((2, T), np.int32)
    agree(case.run(module), lambda arrays, state: expected(case, arrays, state, ids), arrays, state)


def poisoned(arrays, real):
    """NaN in every argument of a token that is padding."""
    seen = lambda x: jnp.asarray(real).reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
    hide = lambda x: jnp.where(seen(x), x, jnp.nan)
    return {name: hide(x) if name in PER_TOKEN else x for name, x in arrays.items()}


IDS = np.array([[0, 0, -1, 0, 3, 3, 3, -1, -1, 7, -1], [-1, -1, 5, 5, 5, 5, 5, 1, 1, 1, 1]])


def segments_and_padding(case):
    """From the last token; sequences in one row come from the first."""
    module = case.module(reverse=True)
    arrays, state = case.make(2, T), case.make_state(2)
    gradients = agree(
        case.run(module, segment_ids=jnp.asarray(IDS)),
        lambda arrays, state: expected(case, arrays, state, IDS, True),
        poisoned(arrays, IDS >= 0),
        state,
        clean=arrays,
    )
    for name in set(gradients) & set(PER_TOKEN):
        assert not np.any(np.asarray(gradients[name])[IDS < 0])


@pytest.mark.few(1)
@cases(*(name for name in FULL if name != PRODUCT))
def test_segments_and_padding(case):
    segments_and_padding(case)


def test_writes_of_a_token_keep_their_order():
    """Also in a reversed call: that of a case whose writes differ."""
    segments_and_padding(CASES[PRODUCT])


# An empty sequence among others, and padding on either side.
OFFSETS = np.array([1, 6, 6, 7, 10])
SEQUENCES = np.stack(
    [np.where((a <= np.arange(T)) & (np.arange(T) < b), 0, -1) for a, b in itertools.pairwise(OFFSETS)]
)


def apart(case, reverse=False):
    """The formula for each sequence of `OFFSETS` by itself."""

    def formula(arrays, state):
        rows = {n: jnp.stack([x] * len(SEQUENCES)) if n in PER_TOKEN else x for n, x in arrays.items()}
        out, state = expected(case, rows, state, SEQUENCES, reverse)
        return out.sum(0), state

    return formula


def no_gradient_outside(gradients):
    for name in set(gradients) & set(PER_TOKEN):
        assert not np.any(np.asarray(gradients[name])[(SEQUENCES < 0).all(0)])


@pytest.mark.few(1)
@full
def test_offsets(case):
    """Packed sequences are those alone."""
    run = case.run(case.module(), cu_seqlens=jnp.asarray(OFFSETS))
    arrays, state = case.make(T), case.make_state(len(SEQUENCES))
    given = poisoned(arrays, (SEQUENCES >= 0).any(0))
    no_gradient_outside(agree(run, apart(case), given, state, clean=arrays))


# An empty sequence with a slot, and a sequence without one.
SLOTS = np.array([4, 1, -1, 2])


def pooled(case, formula):
    """`formula(arrays, states)` with the states taken from a pool, and put back."""

    def call(arrays, pool):
        used = SLOTS >= 0
        take = lambda x: jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x[SLOTS], 0)
        out, final = formula(arrays, jax.tree.map(take, pool))
        return out, jax.tree.map(lambda x, new: x.at[SLOTS[used]].set(new[used]), pool, final)

    return call


@pytest.mark.slow
@cases("linear normalized", "gated delta bounded", "state space group norm", "trapezoid ranks")
def test_offsets_into_a_pool(case):
    """Packed sequences begin with the states in their slots and leave theirs there; without a slot from zero, and nothing is left."""
    offsets, slots = jnp.asarray(OFFSETS), jnp.asarray(SLOTS)
    run = case.run(case.module(), cu_seqlens=offsets, state_indices=slots)
    arrays, pool = case.make(T), case.make_state(6)
    agree(run, pooled(case, apart(case)), arrays, pool)


def test_rows_into_a_pool():
    """The same for rows, of which padding is skipped."""
    case = CASES["gated linear"]
    arrays, pool = case.make(4, T), case.make_state(6)
    ids = np.zeros((4, T), np.int32)
    ids[2, 5:] = -1
    agree(
        case.run(case.module(), segment_ids=jnp.asarray(ids), state_indices=jnp.asarray(SLOTS)),
        pooled(case, lambda arrays, state: expected(case, arrays, state, ids)),
        arrays,
        pool,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lightning given", "state space gated"])
def test_rates_without_bound(name):
    """A head whose rate is infinite keeps nothing from token to token; its padding still passes the state."""
    case = CASES[name]
    rate, sign = ("A", -1) if "space" in name else ("slopes", 1)
    arrays, state = case.make(2, T), case.make_state(2)
    given = {**arrays, rate: arrays[rate].at[0].set(sign * jnp.inf)}
    agree(
        case.run(case.module(), segment_ids=jnp.asarray(IDS)),
        lambda arrays, state: expected(case, arrays, state, IDS),
        given,
        state,
        clean={**arrays, rate: arrays[rate].at[0].set(sign * 1e9)},
    )


@pytest.mark.slow
@cases(
    "linear constant",
    "kernel delta softplus",
    "gated delta bounded",
    "delta product gated",
    "state space group norm",
    "trapezoid ranks",
)
def test_offsets_on_interpreted_kernels(case):
    """The same through the kernels that the compiler cannot see into, from whose padding nothing may leak."""
    pytest.importorskip("triton")
    module = case.module(config=None, platform="triton-interpret", reverse=True)
    arrays, state = case.make(T, dtype=jnp.float32), case.make_state(len(SEQUENCES), dtype=jnp.float32)
    run = case.run(module, cu_seqlens=jnp.asarray(OFFSETS))
    given = poisoned(arrays, (SEQUENCES >= 0).any(0))
    pulled = cotangents(jax.eval_shape(run, arrays, state))
    got, gradients = with_gradients(run, given, state, pulled)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (arrays, state, pulled))
    want, wanted = with_gradients(apart(case, True), *wide)
    jax.tree.map(assert_close, got, want)
    jax.tree.map(lambda x, y: assert_close(x, y, kind="gradient"), gradients, wanted)
    no_gradient_outside(gradients[0])


def tokens_of(case, arrays, at):
    """The arguments of a step, or of a part of the tokens; there is one leading axis."""
    return {name: x[:, at] if name in PER_TOKEN else x for name, x in arrays.items()}


@pytest.mark.few(1)
@full
def test_steps_and_parts_are_the_whole(case):
    module, length = case.module(), 6
    arrays, state = case.make(2, length), case.make_state(2)
    call = quick(case.run(module))
    out, final = call(arrays, state)

    first, between = call(tokens_of(case, arrays, slice(0, 4)), state)
    second, last = call(tokens_of(case, arrays, slice(4, None)), between)
    assert_close(jnp.concatenate([first, second], 1), out)
    jax.tree.map(assert_close, last, final)

    step = quick(lambda arrays, state: case.call(module.step, arrays, state))
    outs = []
    for t in range(length):
        one, state = step(tokens_of(case, arrays, t), state)
        outs.append(one)
    assert_close(jnp.stack(outs, 1), out)
    jax.tree.map(assert_close, state, final)


@pytest.mark.few(2)
@full
def test_step_with_slots(case):
    """Rows of a pool are the states of their own; a row without a slot gives 0 and writes nothing."""
    module, slots = case.module(), jnp.array([3, -1, 0])
    arrays, pool = case.make(3), case.make_state(5)
    out, new = quick(lambda a, s: case.call(module.step, a, s, state_indices=slots))(arrays, pool)
    own, states = quick(lambda a, s: case.call(module.step, a, s))(
        arrays, jax.tree.map(lambda x: x[slots], pool)
    )
    assert not np.any(np.asarray(out[1]))
    for row, slot in ((0, 3), (2, 0)):
        assert_close(out[row], own[row])
        jax.tree.map(lambda x, y, row=row, slot=slot: assert_close(x[slot], y[row]), new, states)
    for untouched in (1, 2, 4):
        jax.tree.map(lambda x, y, n=untouched: np.testing.assert_array_equal(x[n], y[n]), new, pool)


@pytest.mark.few(2)
@full
def test_gradients_of_a_step(case):
    module = case.module()
    arrays, state = case.make(2, 1), case.make_state(2)

    def one(arrays, state):
        out, state = case.call(module.step, tokens_of(case, arrays, 0), state)
        return out[:, None], state

    agree(one, lambda a, s: expected(case, a, s, np.zeros((2, 1), np.int32)), arrays, state)


@pytest.mark.few(2)
@full
def test_no_token_leaves_the_state(case):
    arrays, state = case.make(2, 0), case.make_state(2)
    out, final = case.call(case.module(), arrays, initial_state=state)
    assert out.shape[:2] == (2, 0)
    jax.tree.map(np.testing.assert_array_equal, final, state)
    _, final = case.call(case.module(), arrays)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, jnp.zeros_like(y)), final, state)


# Transformations


@pytest.mark.slow
@cases(
    "linear constant",
    "kernel delta softplus",
    "dplr",
    "delta product gated",
    "state space group norm",
    "trapezoid",
)
def test_vmap_with_shared_arguments(case):
    """A mapped axis is a leading one, whichever arguments have it; what is not mapped takes the sum of gradients."""
    module = case.module()
    arrays, state = case.make(3, 5), case.make_state()
    shared = [name for name in arrays if name not in PER_TOKEN or name in ("k", "B")]
    arrays = {name: x[0] if name in shared and name in PER_TOKEN else x for name, x in arrays.items()}
    axes = {name: None if name in shared else 0 for name in arrays}
    call = lambda arrays: case.call(module, arrays, initial_state=state)
    wide = {n: jnp.stack([x] * 3) if n in shared and n in PER_TOKEN else x for n, x in arrays.items()}
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), state)

    def total(results):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results))

    mapped = quick(jax.value_and_grad(lambda arrays: total(jax.vmap(call, in_axes=(axes,))(arrays))))
    led = quick(jax.value_and_grad(lambda arrays: total(case.call(module, arrays, initial_state=states))))
    (got, gradients), (want, wanted) = mapped(arrays), led(wide)
    assert_close(got, want)
    for name, x in gradients.items():
        summed = wanted[name].sum(0) if name in shared and name in PER_TOKEN else wanted[name]
        assert_close(x, summed, kind="gradient", name=name)


@pytest.mark.slow
def test_any_number_of_leading_axes():
    case = CASES["gated delta softplus"]
    arrays, state = case.make(6, 3), case.make_state(6)
    call = quick(case.run(case.module()))
    out, final = call(arrays, state)
    lead = lambda x, *lead: x.reshape(*lead, *x.shape[1:])
    for axes in ((2, 3), (1, 6, 1)):
        several = {n: lead(x, *axes) if n in PER_TOKEN else x for n, x in arrays.items()}
        got, state_got = call(several, lead(state, *axes))
        assert_close(got, lead(out, *axes))
        assert_close(state_got, lead(final, *axes))
    alone = {n: x[0] if n in PER_TOKEN else x for n, x in arrays.items()}
    assert_close(call(alone, state[0])[0], out[0])


def test_lowering_does_not_grow_with_the_values_of_traced_decays():
    """`g_gamma` and `slopes` are arrays of the call: new ones compile nothing new."""
    traces = []
    linear, given = ejx.LinearAttention(), ejx.LightningAttention(None)
    x = jnp.ones((5, 2, 4))

    @quick
    def both(gamma):
        traces.append(gamma)
        return linear(x, x, x, g_gamma=-gamma)[0], given(x, x, x, slopes=gamma)[0]

    for gamma in (jnp.array([0.1, 0.2]), jnp.array([0.3, 0.0])):
        assert_close(*both(gamma))
    assert len(traces) == 1


# Dtypes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype", [("linear normalized", "float16"), ("state space group norm", "bfloat16")]
)
def test_sixteen_bits(name, dtype):
    """Outputs and gradients have the dtypes of the arguments; the states are float32, or as asked for."""
    case = CASES[name]
    arrays, state = case.make(2, T, dtype=dtype), case.make_state(2, dtype="float32")
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (arrays, state))
    pulled = jax.tree.map(jnp.ones_like, jax.eval_shape(case.run(case.module()), arrays, state))
    (out, final), (gradients, _) = with_gradients(case.run(case.module()), arrays, state, pulled)
    want, _ = quick(lambda a, s: expected(case, a, s, np.zeros((2, T))))(*wide)
    assert out.dtype == dtype
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(final))
    assert_close(out, want, dtype)
    assert all(gradients[name].dtype == dtype and jnp.isfinite(gradients[name]).all() for name in arrays)
    _, final = jax.eval_shape(case.run(case.module(state_dtype=jnp.bfloat16)), arrays, state)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(final))


@pytest.mark.slow
def test_large_sums_in_float16_are_divided_before_they_are_rounded():
    ones = jnp.full((300, 1, 16), 16.0, jnp.float16)
    out, _ = quick(ejx.LinearAttention(1.0, normalize=True).__call__)(ones, ones, ones)
    assert_close(out, jnp.full_like(out, 16.0))
