"""`LSTM`, `GRU` and `RNN`: against PyTorch's layers, Equinox's cells, themselves in pieces; padding, packing, states, errors."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from tests.attention.dense import INTERPRET, normal, quick
from tests.cells import torch_layers
from tests.cells.torch_layers import B, H, I, inputs_of, LAYERS, LENGTHS, loss_weights, T, weights_of
from tests.nn.checks import in_pieces, needs_triton
from tests.tolerances import assert_close

KEY = jax.random.key(0)
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def build(kind: str, *sizes: int, **options) -> Any:
    make: Any = KINDS[kind]
    return make(*(sizes or (I, H)), **options, key=KEY)


# PyTorch's layers


def results_of(case: torch_layers.Layer, platform: str) -> dict[str, Any]:
    options: Any = {"bidirectional": case.bidirectional, "use_bias": case.bias, "activation": case.activation}
    like = eqx.filter_eval_shape(lambda: build(case.kind, I, H, case.layers, platform=platform, **options))
    layer = ejx.load_published(like, weights_of(case))
    given = {name: jnp.asarray(x) for name, x in inputs_of(case).items()}
    if case.kind != "LSTM":
        del given["cell"]
    lengths = jnp.array(LENGTHS) if case.packed else None

    @eqx.filter_jit
    def everything(layer, given):
        def loss(both):
            layer, given = both
            state = nn.CellState(given["hidden"], given.get("cell"))
            y, new = layer(given["x"], state, lengths=lengths)
            found = {"y": y, "final_hidden": new.hidden} | (
                {} if new.cell is None else {"final_cell": new.cell}
            )
            return sum(jnp.sum(x * loss_weights(x)) for x in found.values()), found

        (_, found), (d_layer, d_given) = eqx.filter_value_and_grad(loss, has_aux=True)((layer, given))
        return found | {f"d_{name}": x for name, x in {**d_layer.weights, **d_given}.items()}

    return everything(layer, given)


def agree(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], kind="gradient" if name.startswith("d_") else "forward", name=name)


ON_TRITON = ("lstm, all options", "gru, no bias", "rnn")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name, platform",
    [(name, "xla") for name in LAYERS]
    + [pytest.param(name, INTERPRET, marks=pytest.mark.slow) for name in ON_TRITON],
)
def test_golden(name, platform):
    """Outputs, final states and every gradient, from PyTorch's names."""
    needs_triton(platform)
    agree(results_of(LAYERS[name], platform), torch_layers.golden()[name])


@pytest.mark.slow
def test_the_golden_file_is_of_today():
    pytest.importorskip("torch")
    kept = torch_layers.golden()
    assert set(kept) == set(LAYERS)
    for name, layer in LAYERS.items():
        for result, x in torch_layers.live(layer).items():
            np.testing.assert_allclose(kept[name][result], x, rtol=0, atol=1e-6)


def test_published_weights_have_to_fit():
    layer, state = build("GRU"), weights_of(torch_layers.Layer("GRU"))
    loaded = ejx.load_published(layer, {f"encoder.{name}": x for name, x in state.items()}, "encoder")
    np.testing.assert_array_equal(loaded.weights["weight_hh_l0"], state["weight_hh_l0"])
    for wrong in (
        weights_of(torch_layers.Layer("GRU", bidirectional=True)),
        weights_of(torch_layers.Layer("GRU", bias=False)),
        weights_of(torch_layers.Layer("LSTM")),
        state | {"weight_hr_l0": state["weight_hh_l0"]},
    ):
        with pytest.raises(ejx.CheckpointError):
            ejx.load_published(layer, wrong)


# Equinox's cells


@pytest.mark.parametrize("kind, use_bias", [("LSTM", True), ("GRU", True), ("GRU", False)])
def test_from_equinox(kind, use_bias):
    old: Any = {"LSTM": eqx.nn.LSTMCell, "GRU": eqx.nn.GRUCell}[kind](I, H, use_bias, key=KEY)
    layer, x = getattr(nn, kind).from_equinox(old), normal(1, T, I)
    zeros = jnp.zeros(H)
    carry = (zeros, zeros) if kind == "LSTM" else zeros

    def scanned(cell, x):
        last, states = jax.lax.scan(lambda c, x: (cell(x, c),) * 2, carry, x)
        return states[0] if kind == "LSTM" else states, last

    (y, state), (expected, last) = quick(lambda x: (layer(x, layer.init_state()), scanned(old, x)))(x)
    assert_close(y, expected)
    assert_close(state.hidden[0], last[0] if kind == "LSTM" else last)
    if kind == "LSTM":
        assert_close(state.cell[0], last[1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_other_layers_of_equinox_are_refused(kind, unchecked):
    with pytest.raises(ValueError, match=f"cell: expected an equinox.nn.{kind}Cell, received Linear"):
        getattr(nn, kind).from_equinox(eqx.nn.Linear(2, 2, key=KEY))


# Sequences


@pytest.mark.slow
@pytest.mark.parametrize("kind, platform", [("LSTM", INTERPRET), ("GRU", "xla")])
def test_decoding_in_pieces(kind, platform):
    needs_triton(platform)
    layer = build(kind, I, H, 2, platform=platform)
    call, x = eqx.filter_jit(layer), normal(1, 2, T, I)
    whole, last = call(x, layer.init_cache(2, 100))
    y, state = in_pieces(layer, x, (3, 1, T - 4), layer.init_state(2))
    assert_close(y, whole)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        assert_close(a, b)
    assert_close(call(x), whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind, form", [("LSTM", "padding_mask"), ("GRU", "lengths"), ("RNN", "segment_ids")])
def test_padding_is_as_if_it_were_not_there(kind, form):
    """In both directions and every layer, and in gradients of the weights; with NaN there."""
    layer = build(kind, I, H, 2, bidirectional=True)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    forms: Any = {"padding_mask": real, "lengths": np.array(LENGTHS), "segment_ids": np.where(real, 3, -1)}
    x = normal(1, B, T, I)

    def loss(layer, x, **tokens):
        y, state = layer(x, layer.init_state(x.shape[:-2]), **tokens)
        return jnp.sum(jnp.sin(y)) + sum(map(jnp.sum, jax.tree.leaves(state))), (y, state)

    run = eqx.filter_value_and_grad(loss, has_aux=True)
    padded = jnp.where(real[..., None], x, jnp.nan)
    (_, (y, state)), gradients = eqx.filter_jit(run)(layer, padded, **{form: jnp.asarray(forms[form])})
    rows = [x[row, :length] for row, length in enumerate(LENGTHS)]
    alone = eqx.filter_jit(lambda layer, rows: [run(layer, row) for row in rows])(layer, rows)
    for row, (length, ((_, expected), _)) in enumerate(zip(LENGTHS, alone)):
        assert not np.asarray(y[row, length:]).any()
        own = y[row, :length], jax.tree.map(lambda s, row=row: s[row], state)
        jax.tree.map(assert_close, *map(jax.tree.leaves, (own, expected)))
    total = jax.tree.map(lambda *parts: sum(parts), *(own for _, own in alone))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(total), strict=True):
        assert_close(a, b, kind="gradient")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_packed_and_reset_sequences(kind):
    layer = build(kind, bidirectional=True)
    x, offsets = normal(1, T, I), jnp.array([0, 2, 2, T])
    filled = jax.tree.map(lambda s: normal(2, *s.shape), layer.init_state(3))
    out, state = quick(lambda x: layer(x, filled, cu_seqlens=offsets))(x)
    for n, (start, end) in enumerate(((0, 2), (2, 2), (2, T))):
        own = jax.tree.map(lambda s, n=n: s[n], filled)
        y, left = layer(x[start:end], own)
        assert_close(out[start:end], y)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(left), strict=True):
            assert_close(a[n], b)
    resets = jnp.zeros(T, bool).at[2].set(True)
    y = quick(lambda x: layer(x, resets=resets))(x)
    assert_close(y, jnp.concatenate([layer(x[:2]), layer(x[2:])]))


# Weights, dtypes, dropout


def test_parameters():
    for case in LAYERS.values():
        options: Any = {"bidirectional": case.bidirectional, "use_bias": case.bias}
        layer = build(case.kind, I, H, case.layers, **options)
        assert {n: w.shape for n, w in layer.weights.items()} == torch_layers.shapes_of(case)
        values = np.concatenate([np.ravel(w) for w in layer.weights.values()])
        assert np.abs(values).max() <= H**-0.5 < 1.2 * np.abs(values).max()


@pytest.mark.slow
def test_dtypes():
    x = normal(1, 2, T, I)
    layer = build("LSTM", dtype=jnp.bfloat16)
    y, state = layer(x.astype(jnp.bfloat16), layer.init_state(2))
    assert y.dtype == jnp.bfloat16 and state.hidden.dtype == state.cell.dtype == jnp.float32
    assert layer(x).dtype == jnp.float32
    narrow = build("LSTM", compute_dtype=jnp.bfloat16, state_dtype=jnp.bfloat16)
    y, state = narrow(x, narrow.init_state(2))
    assert y.dtype == state.hidden.dtype == state.cell.dtype == jnp.bfloat16
    assert_close(y, build("LSTM")(x), jnp.bfloat16)


def test_dropout_between_layers():
    """On the outputs of all layers but the last, scaled; none in inference."""
    layer, x = build("GRU", 4, 32, 2, dropout_rate=0.25), normal(1, 2, T, 4)
    call = eqx.filter_jit(layer)
    plain = call(x, inference=True)
    assert np.abs(np.asarray(call(x, key=KEY) - plain)).max() > 1e-3
    np.testing.assert_array_equal(call(x, key=jax.random.key(0)), call(x, key=KEY))
    np.testing.assert_array_equal(call(x, key=KEY, inference=True), plain)
    # With identity for the second layer's input, what it sees is scaled or zero.
    first = build("RNN", 4, 64, activation="identity")
    zero, eye = jnp.zeros((64, 64)), jnp.eye(64)
    second = build("RNN", 4, 64, 2, use_bias=False, activation="identity", dropout_rate=0.25)
    weights = {k: first.weights[k] for k in ("weight_ih_l0", "weight_hh_l0")}
    second = eqx.tree_at(lambda m: m.weights, second, weights | {"weight_ih_l1": eye, "weight_hh_l1": zero})
    seen, given = second(x, key=KEY), eqx.nn.inference_mode(second)(x)
    kept = np.asarray(seen) != 0
    assert 0.6 < kept.mean() < 0.9
    assert_close(np.asarray(seen)[kept], np.asarray(given)[kept] / np.float32(0.75))


def test_weights_of_several_layers_are_refused():
    layers = eqx.filter_vmap(lambda key: nn.LSTM(H, H, key=key))(jax.random.split(KEY, 3))
    with pytest.raises(ValueError, match=r"weight_ih_l0: .*jax\.vmap over stacked layers"):
        layers(normal(1, T, H))
    assert {c.operation for c in ejx.explain(build("LSTM"), normal(1, T, I)).choices} == {"recurrent"}


CALLS: list[tuple[dict[str, Any], list[str]]] = [
    (dict(x=np.ones((B, T, I + 1), np.float32)), ["x", "E = 4", "(3, 6, 5)"]),
    (dict(x=np.ones(I, np.float32)), ["x", "T = 1"]),
    (dict(padding_mask=np.ones((B, T))), ["padding_mask", "booleans", "!= 0"]),
    (dict(padding_mask=np.ones(T, bool)), ["padding_mask", "broadcast it first"]),
    (dict(segment_ids=np.ones((B, T))), ["segment_ids", "integers"]),
    (dict(lengths=np.array([1, 2])), ["lengths", "(3,)", "(2,)"]),
    (dict(lengths=np.array([1, 2, T + 1])), ["lengths", "0 to 6"]),
    (dict(resets=np.ones((B, T))), ["resets", "booleans", "float"]),
    (dict(cu_seqlens=np.array([0, 6])), ["cu_seqlens", "one row"]),
    (dict(cu_seqlens=np.array([0, 6]), lengths=np.array([6])), ["cu_seqlens", "lengths", "both"]),
    (dict(state=1), ["state", "CellState", "int", "init_state"]),
    (dict(state=build("GRU").init_state(B)), ["state", "CellState of this kind"]),
    (dict(state=build("LSTM").init_state(B + 1)), ["state", "(3, 1, 5)", "(4, 1, 5)"]),
    (dict(layer=build("LSTM", I, H, 2, dropout_rate=0.5)), ["key", "a PRNG key"]),
    (dict(hidden_size=0), ["hidden_size", "positive"]),
    (dict(num_layers=1.5), ["num_layers", "1.5"]),
    (dict(bidirectional=1), ["bidirectional", "True or False"]),
    (dict(dropout_rate=1.0), ["dropout_rate", "[0, 1)"]),
    (dict(activation="softmax"), ["activation", "'softmax'"]),
    (dict(gate_activation="hard_sigmoid"), ["gate_activation", "no gates"]),
    (dict(dtype=jnp.int8), ["dtype", "int8"]),
    (dict(key=1), ["key", "PRNG key"]),
]


@pytest.mark.parametrize("change, words", CALLS)
def test_wrong_calls_and_constructors(change, words, unchecked):
    known = ("x", "padding_mask", "segment_ids", "lengths", "resets", "cu_seqlens", "state", "layer")
    with pytest.raises(ValueError) as caught:
        if change.keys() <= set(known):
            x = np.ones((B, T, I)[1 if len(change) > 1 else 0 :], np.float32)
            layer = change.get("layer", build("LSTM"))
            layer(**{"x": x} | {name: value for name, value in change.items() if name != "layer"})
        else:
            nn.RNN(**{"input_size": I, "hidden_size": H, "key": KEY} | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
