"""Recurrent cells on XLA and by their Triton kernels, interpreted: against the reference, packed, padded, in pieces, composed."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ejkernel_eqx as ejx
from ejkernel_eqx.cells.spec import ACTIVATIONS, GATE_ACTIVATIONS, GATES
from tests.agreement import assert_agrees, assert_same, platforms
from tests.attention.dense import INTERPRET, quick
from tests.cells.cases import called, Case, CASES, exact, make, plain, poison, results
from tests.tolerances import assert_close

platform = platforms()


def check(case: Case, platform: str, **options) -> None:
    """Results and every gradient; bit for bit the same with NaN in the padding."""
    arrays, cotangents = make(case)
    op = case.operation(platform=platform, **options)
    found = results(op, arrays, case.packing, cotangents)
    for name, x in arrays.items():
        assert found[f"d_{name}"].dtype == x.dtype and found[f"d_{name}"].shape == x.shape
    assert found["out"].dtype == arrays["inputs"].dtype and found["final_hidden"].dtype == jnp.float32
    assert_agrees(case, found, exact(case, arrays, cotangents))
    assert not np.asarray(found["out"])[~case.real].any()
    if not case.real.all():
        again = results(op, poison(case, arrays), case.packing, cotangents)
        assert_same(again, found)


QUICK = {("offsets", "xla"), ("bfloat16", "xla"), ("resets", INTERPRET), ("lengths in reverse", INTERPRET)}


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        pytest.param(name, platform, marks=() if (name, platform) in QUICK else pytest.mark.slow)
        for name in CASES
        for platform in ("xla", INTERPRET)
    ],
    indirect=["platform"],
)
def test_agrees_with_the_reference(name, platform):
    check(CASES[name], platform)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_biases_have_gradients_summed_in_float32(dtype):
    """Over thousands of tokens; a sum in 16 bits loses the small terms."""
    case = Case("gru", B=256, T=9, H=8, I=4, dtype=dtype)
    arrays, cotangents = make(case)
    found = results(case.operation(platform="xla"), arrays, case.packing, cotangents)
    expected = exact(case, arrays, cotangents)
    for name in ("d_bias_ih", "d_bias_hh"):
        assert_close(found[name], expected[name], dtype, "gradient", name=name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "per_step", "persistent"])
@pytest.mark.parametrize("name", ["gru", "lengths in reverse", "resets and lengths", "offsets"])
def test_tiles_and_launches(name, form):
    """Several tiles of rows and columns, blocks that sizes do not fill, and one launch per step."""
    pytest.importorskip("triton")
    from ejkernel_eqx.cells.triton.tile_sizes import CellTile, TritonConfig

    case = dataclasses.replace(CASES[name], H=40)
    if case.packed is None:
        case = dataclasses.replace(
            case, B=19, lengths=case.lengths and case.lengths * 7, resets=case.resets and case.resets * 7
        )
        case = dataclasses.replace(
            case, lengths=case.lengths and case.lengths[:19], resets=case.resets and case.resets[:19]
        )
    config = TritonConfig(CellTile(16, 16, 32, 4, 1, form), CellTile(16, 32, 16, 4, 1, form))
    check(case, INTERPRET, config=config)


@pytest.mark.parametrize("form", [pytest.param("whole", marks=pytest.mark.slow), "per_step", "persistent"])
def test_a_launch_per_step(form):
    pytest.importorskip("triton")
    from ejkernel_eqx.cells.triton.tile_sizes import CellTile, TritonConfig

    case = Case("gru", T=3, B=3, H=18, lengths=(2, 3, 0))
    tile = CellTile(16, 16, 16, 4, 1, form)
    check(case, INTERPRET, config=TritonConfig(tile, tile))


PLAIN = {
    **{f"{kind}, {act}": Case(kind, activation=act) for kind in GATES for act in ACTIVATIONS},
    **{f"{kind}, {gate}": Case(kind, gate=gate) for kind in ("lstm", "gru") for gate in GATE_ACTIVATIONS},
    "reverse": Case(reverse=True),
    "short segments": CASES["short segments"],
    "padding inside": CASES["padding inside"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_is_the_formula(name):
    case = PLAIN[name]
    arrays, cotangents = make(case)
    expected = exact(case, arrays, cotangents)
    states = [np.asarray(arrays[n], np.float64) for n in ("hidden", "cell") if n in arrays]
    for row in range(case.B):
        ids = np.zeros(case.T, int) if case.ids is None else case.ids[row]
        state, before = [s[row] for s in states], None
        for segment in dict.fromkeys(ids[ids >= 0]):
            state = state if before is None else [np.zeros_like(s) for s in state]
            mine, before = ids == segment, segment
            y, state = plain(case, arrays, np.asarray(arrays["inputs"][row], np.float64)[mine], state)
            np.testing.assert_allclose(expected["out"][row][mine], y, rtol=1e-12, atol=1e-12)
        for name, s in zip(("final_hidden", "final_cell"), state):
            np.testing.assert_allclose(expected[name][row], s, rtol=1e-12, atol=1e-12)


# Sequences in rows


def sequences_of(case: Case) -> list[list[tuple[int, int]]]:
    """By hand: where the sequences of each row begin and end."""
    found = []
    for row in range(case.B):
        end = case.T if case.lengths is None else case.lengths[row]
        cuts = sorted({t for t in (case.resets[row] if case.resets else ()) if 0 < t < end})
        found.append([pair for pair in itertools.pairwise([0, *cuts, end]) if pair[0] < pair[1]])
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["lengths", "lengths in reverse", "resets", "resets and lengths", "resets in reverse"]
)
def test_rows_are_as_their_sequences_alone(name):
    """Lengths of 0 keep the state; a reset, also at the first token, starts from zeros, and in reverse nothing passes it either."""
    case = CASES[name]
    arrays, _ = make(case)
    outs, *finals = quick(functools.partial(called, case.operation(platform="xla")))(
        poison(case, arrays), case.packing
    )
    for row, spans in enumerate(sequences_of(case)):
        initial = [np.asarray(arrays[n][row], np.float64) for n in ("hidden", "cell") if n in arrays]
        state, first = initial, True
        for start, end in reversed(spans) if case.reverse else spans:
            is_reset = not case.reverse and case.resets is not None and start in case.resets[row]
            state = state if first and not is_reset else [np.zeros_like(s) for s in initial]
            first = False
            x = np.asarray(arrays["inputs"][row, start:end], np.float64)
            y, state = plain(case, arrays, x, state)
            assert_close(outs[row, start:end], y)
        for final, s in zip(finals, state, strict=True):
            assert_close(final[row], s)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offsets", "offsets in reverse"])
def test_packed_as_one_by_one(name):
    case = CASES[name]
    arrays, _ = make(case)
    outs, *finals = quick(functools.partial(called, case.operation(platform="xla")))(arrays, case.packing)
    assert case.offsets is not None
    for n, (start, end) in enumerate(itertools.pairwise(case.offsets)):
        state = [np.asarray(arrays[k][n], np.float64) for k in ("hidden", "cell") if k in arrays]
        y, state = plain(case, arrays, np.asarray(arrays["inputs"][start:end], np.float64), state)
        assert_close(outs[start:end], y) if end > start else None
        for final, s in zip(finals, state, strict=True):
            assert_close(final[n], s)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_in_pieces(kind, platform):
    """A sequence in chunks and token by token, with resets: what the whole at once gives."""
    case = Case(kind, resets=((0, 3), (5,)))
    arrays, _ = make(case)
    op, resets = case.operation(platform=platform), case.packing["resets"]
    call = quick(functools.partial(called, op))
    out, *finals = call(arrays, case.packing)
    state, outs, at = {n: arrays[n] for n in ("hidden", "cell") if n in arrays}, [], 0
    for size in (2, 4, 1):
        piece = {"inputs": arrays["inputs"][:, at : at + size]}
        if size == 1:
            given = tuple(state.values()) if kind == "lstm" else state["hidden"]
            parameters = arrays["weight_hh"], arrays["bias_hh"]
            named = {n: arrays[n] for n in ("weight_ih", "bias_ih")}
            y, new = quick(op.step)(piece["inputs"][:, 0], *parameters, given, **named)
            y, new = y[:, None], new if kind == "lstm" else (new,)
        else:
            y, *new = call(arrays | state | piece, {"resets": resets[:, at : at + size]})
        state = dict(zip(state, new, strict=True))
        outs.append(y)
        at += size
    assert_close(jnp.concatenate(outs, 1), out)
    for a, b in zip(state.values(), finals, strict=True):
        assert_close(a, b)


# Composition


@pytest.mark.slow
@pytest.mark.parametrize("kind", GATES)
def test_composes(kind, platform):
    """vmap of every argument, scan over layers, checkpoint, leading axes."""
    case = Case(kind, B=3, T=4, H=5, I=5)
    arrays, _ = make(case)
    op = case.operation(platform=platform)

    def loss(arrays):
        out, *finals = called(op, arrays, {})
        # Transposed: what comes back is strided as JAX likes it.
        return jnp.sum(jnp.sin(jnp.swapaxes(out, -1, -2))) + sum(jnp.sum(f**2) for f in finals)

    wanted = quick(jax.grad(loss))(arrays)
    rows = ("inputs", "hidden", "cell")
    axes = {name: 0 if name in rows else None for name in arrays}
    by_row = quick(jax.vmap(jax.grad(loss), (axes,)))(arrays)
    for name, x in by_row.items():
        assert_close(x if name in rows else x.sum(0), wanted[name], kind="gradient", name=name)
    # Weights that are mapped too, and nothing else.
    weights = jnp.stack([arrays["weight_hh"], 2 * arrays["weight_hh"]])
    both = quick(jax.vmap(jax.grad(lambda w: loss(arrays | {"weight_hh": w}))))(weights)
    assert_close(both[0], wanted["weight_hh"], kind="gradient")
    doubled = quick(jax.grad(loss))(arrays | {"weight_hh": weights[1]})
    assert_close(both[1], doubled["weight_hh"], kind="gradient")
    deep = {n: x.reshape(3, 1, *x.shape[1:]) if n in rows else x for n, x in arrays.items()}
    for name, x in quick(jax.grad(loss))(deep).items():
        assert_close(x.reshape(wanted[name].shape), wanted[name], kind="gradient", name=name)

    def layers(x, scanned):
        one = lambda x, w: called(op, arrays | {"inputs": x, "weight_hh": w}, {})[0]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(one)(x, w), None), x, weights)
            return jnp.sum(jnp.sin(x))
        return jnp.sum(jnp.sin(one(one(x, weights[0]), weights[1])))

    found, expected = (quick(jax.grad(lambda x, s=s: layers(x, s)))(arrays["inputs"]) for s in (True, False))
    assert_close(found, expected, kind="gradient")


@pytest.mark.slow
def test_any_leading_axes():
    arrays, _ = make(Case(B=6))
    op = ejx.Recurrent(platform="xla")
    out, hidden, cell = called(op, arrays, {})
    rows = ("inputs", "hidden", "cell")
    deep = {n: x.reshape(2, 3, *x.shape[1:]) if n in rows else x for n, x in arrays.items()}
    for a, b in zip(called(op, deep, {"lengths": jnp.full((2, 3), 7)}), (out, hidden, cell)):
        assert_close(a.reshape(b.shape), b)
    none = {n: x[0] if n in rows else x for n, x in arrays.items()}
    assert_close(called(op, none, {})[0], out[0])
    empty, *state = called(op, arrays | {"inputs": arrays["inputs"][:, :0]}, {})
    assert empty.shape == (6, 0, 6)
    np.testing.assert_array_equal(state[0], arrays["hidden"])
    np.testing.assert_array_equal(state[1], arrays["cell"])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", GATES)
def test_forward_mode_and_second_derivatives_on_xla(kind, enable_x64):
    """Against a plain scan of the formulas, which JAX differentiates."""
    case = Case(kind, T=4, dtype="float64", resets=((2,), ()))
    arrays, cotangents = make(case)
    op = case.operation(platform="xla")

    def mine(arrays):
        return sum(jnp.sum(a * b) for a, b in zip(called(op, arrays, case.packing), cotangents))

    def plainly(arrays):
        from ejkernel_eqx.cells.formulas import advance
        from ejkernel_eqx.cells.spec import CellSpec

        state = tuple(arrays.get(n, jnp.zeros((case.B, case.H))) for n in ("hidden", "cell"))
        total, bias = 0.0, arrays["bias_hh"][None]
        for t in range(case.T):
            state = tuple(jnp.where(case.packing["resets"][:, t, None], 0.0, s) for s in state)
            x = arrays["inputs"][:, t] @ arrays["weight_ih"].T + arrays["bias_ih"][None]
            state = advance(CellSpec(kind), x, state[0] @ arrays["weight_hh"].T + bias, *state)
            total += jnp.sum(state[0] * cotangents[0][:, t])
        return total + sum(jnp.sum(a * b) for a, b in zip(state, cotangents[1:]))

    v = {name: jnp.cos(x) for name, x in arrays.items()}
    for pair in ((mine, plainly), (jax.grad(mine), jax.grad(plainly))):
        found, expected = (quick(lambda a, v, f=f: jax.jvp(f, (a,), (v,))[1])(arrays, v) for f in pair)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(a, b, kind="gradient")


def test_the_triton_kernels_refuse_forward_mode():
    pytest.importorskip("triton")
    arrays, _ = make(Case(T=1))
    op = ejx.Recurrent(platform=INTERPRET)
    with pytest.raises(ejx.UnsupportedError, match="forward"):
        jax.jvp(lambda a: called(op, a, {})[0], (arrays,), (arrays,))


def loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from loops(inner)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", GATES)
def test_the_backward_on_xla_is_one_loop_that_carries_states_alone(kind):
    """Gradients of weights are products over all tokens at once, and of gates nothing is stored between forward and backward."""
    case = Case(kind, T=64, B=2, H=8)
    arrays, cotangents = make(case)
    op = case.operation(platform="xla")
    _, pull = jax.vjp(lambda a: called(op, a, {}), arrays)
    tokens, gates = case.T * case.B, GATES[kind] * case.H
    kept = [x.shape for x in jax.tree.leaves(pull) if getattr(x, "size", 0) >= tokens * case.H]
    # The projected inputs, the inputs for the gradient of their weight, and the states.
    states = 2 if kind == "lstm" else 1
    assert sum(int(np.prod(s)) for s in kept) <= tokens * (gates + case.I + states * case.H), kept
    (loop,) = loops(jax.make_jaxpr(pull)(cotangents).jaxpr)
    carried = [v.aval for v in loop.outvars if v.aval.shape[:1] != (case.T,)]
    assert carried and all(a.size <= case.B * case.H for a in carried), carried


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "padding inside", "offsets"])
def test_float64(name, enable_x64):
    case = dataclasses.replace(CASES[name], dtype="float64")
    arrays, cotangents = make(case)
    found = results(case.operation(platform="xla"), arrays, case.packing, cotangents)
    assert_agrees(case, found, exact(case, arrays, cotangents))
    with pytest.raises(ejx.UnsupportedError, match="not float64"):
        called(case.operation(platform=INTERPRET), arrays, case.packing)


# Steps and states


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_pools_of_states(kind):
    """A row without a slot touches nothing: not the last slot either; in place when donated."""
    case = Case(kind, B=3, T=1)
    arrays, _ = make(case)
    op, rng = case.operation(platform="xla"), np.random.default_rng(1)
    names = ("hidden", "cell") if kind == "lstm" else ("hidden",)
    pools = [jnp.asarray(rng.standard_normal((5, case.H)), jnp.float32) for _ in names]
    before, indices = [np.array(p) for p in pools], jnp.array([3, -1, 0], jnp.int32)
    form = lambda s: tuple(s) if kind == "lstm" else s[0]
    leaves = lambda s: s if kind == "lstm" else (s,)
    named = {n: arrays[n] for n in ("weight_ih", "bias_ih")}
    call = lambda pools, x: op.step(
        x, arrays["weight_hh"], arrays["bias_hh"], form(pools), **named, state_indices=indices
    )
    x = arrays["inputs"][:, 0]
    out, new = jax.jit(call, donate_argnums=0)(pools, x.at[1].set(jnp.nan))
    assert not np.asarray(out[1]).any()
    for old, pool in zip(before, leaves(new), strict=True):
        np.testing.assert_array_equal(np.asarray(pool)[[1, 2, 4]], old[[1, 2, 4]])
    for row, slot in ((0, 3), (2, 0)):
        state = form([jnp.asarray(p[slot]) for p in before])
        y, alone = op.step(x[row], arrays["weight_hh"], arrays["bias_hh"], state, **named)
        assert_close(out[row], y)
        for pool, s in zip(leaves(new), leaves(alone), strict=True):
            assert_close(pool[slot], s)


def test_dtypes_of_states():
    arrays, _ = make(Case(dtype="bfloat16", T=2))
    for asked, dtype in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        out, *finals = called(ejx.Recurrent(state_dtype=asked, platform="xla"), arrays, {})
        assert out.dtype == jnp.bfloat16 and {f.dtype for f in finals} == {jnp.dtype(dtype)}


# What it is told


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(weight_hh=jnp.ones((23, 6))), ["weight_hh", "[4 * H, H]", "(23, 6)"]),
        (dict(weight_ih=jnp.ones((24, 4))), ["weight_ih", "(24, 4)"]),
        (dict(weight_ih=None), ["inputs", "24", "pass weight_ih"]),
        (dict(bias_hh=jnp.ones(6)), ["bias_hh", "(6,)"]),
        (dict(bias_ih=jnp.ones((1, 24))), ["bias_ih", "(1, 24)"]),
        (dict(inputs=jnp.ones(5)), ["inputs", "rank 2"]),
        (dict(inputs=jnp.ones((2, 7, 5), jnp.int32)), ["inputs", "int32"]),
        (dict(initial_state=jnp.ones((2, 6))), ["initial_state", "(hidden, cell)"]),
        (dict(initial_state=(jnp.ones((2, 6)), None)), ["initial_state", "use zeros"]),
        (dict(initial_state=(jnp.ones((2, 6)), jnp.ones((3, 6)))), ["initial_state", "(3, 6)"]),
        (dict(lengths=jnp.array([7, 8])), ["lengths", "0 to 7", "8"]),
        (dict(lengths=jnp.array([7, -1])), ["lengths", "-1"]),
        (dict(lengths=jnp.array([7])), ["lengths", "(2,)", "(1,)"]),
        (dict(lengths=jnp.ones(2)), ["lengths", "float32"]),
        (dict(resets=jnp.zeros((2, 7), jnp.int32)), ["resets", "int32", "!= 0"]),
        (dict(resets=jnp.zeros(7, bool)), ["resets", "(2, 7)", "(7,)"]),
        (dict(cu_seqlens=jnp.array([0, 7])), ["cu_seqlens", "leading axes"]),
        (dict(cu_seqlens=jnp.array([0, 7]), lengths=jnp.array([1])), ["lengths", "cu_seqlens"]),
        (dict(segment_ids=jnp.zeros((2, 3), jnp.int32)), ["segment_ids", "(2, 7)"]),
        (dict(segment_ids=jnp.zeros((2, 3), jnp.int32), lengths=jnp.array([1, 2])), ["segment_ids", "(2, 7)"]),
    ],
)  # fmt: skip
def test_wrong_arguments(change, words, unchecked):
    arrays = {n: x for n, x in make(Case(initial=False))[0].items()}
    with pytest.raises(ValueError) as caught:
        ejx.Recurrent()(**(arrays | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_options(unchecked):
    wrong: Any = (
        (dict(cell="LSTM"), "one of lstm, gru, rnn, received 'LSTM'"),
        (dict(reverse="yes"), "reverse: expected True or False, received 'yes'"),
        (dict(activation="gelu"), "activation: expected"),
        (dict(gate_activation="tanh"), "gate_activation: expected"),
        (dict(state_dtype="int8"), "state_dtype"),
    )
    for options, word in wrong:
        with pytest.raises(ValueError, match=word):
            ejx.Recurrent(**options)
    state = (jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="only an LSTM has a cell"):
        ejx.Recurrent("gru")(jnp.ones((2, 4, 9)), jnp.ones((9, 3)), initial_state=state)


# Shapes and flags at random


@st.composite
def cases(draw):
    T, B = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    how = draw(st.sampled_from(["none", "ids", "lengths", "offsets"]))
    changes = {}
    if how == "ids":
        row = st.lists(st.integers(-1, 2), min_size=T, max_size=T).map(tuple)
        changes["packed"] = tuple(draw(row) for _ in range(B))
    if how == "lengths":
        changes["lengths"] = tuple(draw(st.integers(0, T)) for _ in range(B))
    if how in ("ids", "lengths") and draw(st.booleans()):
        changes["resets"] = tuple(tuple(draw(st.sets(st.integers(0, T - 1)))) for _ in range(B))
    if how == "offsets":
        changes["packed"] = tuple(sorted(draw(st.lists(st.integers(0, T), min_size=2, max_size=5))))
    kind = draw(st.sampled_from(list(GATES)))
    return Case(
        kind,
        T,
        B,
        I=draw(st.integers(1, 6)),
        H=draw(st.integers(1, 20)),
        initial=draw(st.booleans()),
        bias=draw(st.booleans()),
        reverse=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS[:4])),
        **changes,
    )


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape(case):
    for platform in ("xla", INTERPRET):
        check(case, platform)
