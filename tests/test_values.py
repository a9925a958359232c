"""Values of offsets, lengths, indices and ids: one policy in all families."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import sequences
from tests.attention.dense import normal
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("unchecked")

T, S = 16, 20
QKV: tuple[Any, Any, Any] = normal(0, T, 2, 16), normal(1, T, 2, 16), normal(2, T, 2, 16)
CROSS = (QKV[0], normal(1, S, 2, 16), normal(2, S, 2, 16))
ROWS: tuple[Any, Any, Any] = (CROSS[0][None], CROSS[1][None], CROSS[2][None])


def flash(**arguments):
    return ejx.FlashAttention(platform="xla")(*QKV, **arguments)


def cross(**arguments):
    return ejx.FlashAttention(platform="xla")(*ROWS, **arguments)


def decay(*shape):
    return -jnp.ones(shape)


def paged(lengths=(5, 9), table=((0, 1), (2, 3)), loc=(0, 1, 4)):
    cache = ejx.PagedKVCache(*normal(3, 2, 4, 5, 2, 16))
    bound = cache.bind(jnp.asarray(table), lengths)
    return ejx.RaggedPagedAttention(platform="xla")(QKV[0], bound, query_start_loc=loc)


def append(slots):
    new = normal(4, 3, 2, 16)
    return ejx.PagedKVCache(*normal(3, 2, 4, 5, 2, 16)).append(new, new, slots)


def steps(operation, *operands, state):
    return lambda value: operation.step(*operands, state, state_indices=value)


_ROW = [x[:3] for x in QKV]
_X = normal(5, T, 6)
_SCAN: Any = (_X, jnp.ones((T, 6)), -jnp.ones((6, 4)), normal(6, T, 4), normal(7, T, 4))

# What takes packed sequences of T tokens by their offsets.
PACKED = {
    "attention": lambda value: flash(cu_seqlens=value),
    "keys": lambda value: ejx.FlashAttention(platform="xla")(*QKV, cu_seqlens=jnp.array([0, 4, 8, T]), kv_cu_seqlens=value),
    "mask": lambda value: flash(mask=ejx.Mask.from_cu_seqlens(value)),
    "recurrence": lambda value: ejx.GatedLinearAttention(platform="xla")(*QKV, decay(T, 2, 16), cu_seqlens=value)[0],
    "delta": lambda value: ejx.DeltaRule(platform="xla")(*QKV, jnp.ones((T, 2)), cu_seqlens=value)[0],
    "scan": lambda value: ejx.StateSpaceV1(platform="xla")(*_SCAN, cu_seqlens=value)[0],
    "convolution": lambda value: ejx.CausalConv1d(platform="xla")(_X, normal(6, 6, 4), cu_seqlens=value)[0],
    "pooling": lambda value: jax.grad(lambda x: (ejx.MeanPooling(platform="xla")(x, cu_seqlens=value) ** 2).sum())(_X),
    "cells": lambda value: ejx.Recurrent("rnn", platform="xla")(_X, normal(6, 6, 6), cu_seqlens=value)[0],
    "sequences": lambda value: sequences.cu_seqlens_to_segment_ids(value, T),
    "sums": lambda value: sequences.chunk_global_cumsum(_X, axis=0, cu_seqlens=value),
    "pages": lambda value: paged((9, 9, 9), ((0, 1), (2, 3), (1, 2)), value),
}  # fmt: skip
WRONG_OFFSETS = {"decrease": [0, 10, 5, 16], "negative": [-2, 3, 8, 16], "past the end": [0, 4, 8, 17]}
# What takes a number for each of a few things: a call, right numbers, wrong ones.
NUMBERS = {
    "kv_lengths": (lambda value: cross(kv_lengths=value), [S], [[S + 1], [-1]]),
    "q_lengths": (lambda value: cross(q_lengths=value), [0], [[T + 1], [-1]]),
    "mask.kv_lengths": (lambda value: cross(mask=ejx.Mask.from_lengths(kv_lengths=value)), [S], [[S + 1], [-1]]),
    "q_offset": (lambda value: cross(q_offset=value), [-3], [[2**30], [-(2**30)]]),
    "start": (lambda value: ejx.RaggedDecodeAttention(platform="xla")(QKV[0][:3], ROWS[1].repeat(3, 0), ROWS[2].repeat(3, 0), value, jnp.full(3, S)),
        [0, 4, S], [[0, 0, S + 1], [-1, 0, 0]]),
    "lengths": (lambda value: paged(value), [10, 3], [[11, 3], [5, -1]]),
    "slots": (append, [-1, 7, 50], [[7, 3, 7]]),
    "target": (lambda value: ejx.PagedKVCache(*normal(3, 2, 4, 5, 2, 16)).copy_pages([0, 1], value), [-1, -1], [[2, 2]]),
    "state_indices": (steps(ejx.GatedLinearAttention(platform="xla"), *_ROW, decay(3, 2, 16), state=normal(8, 5, 2, 16, 16)),
        [4, -1, 0], [[5, 0, 1], [-2, 0, 1], [3, 3, 1]]),
    "state_indices of a scan": (
        lambda value: ejx.StateSpaceV1(platform="xla").step(_SCAN[0][:3], _SCAN[1][:3], _SCAN[2], _SCAN[3][:3], _SCAN[4][:3],
            normal(8, 5, 6, 4), state_indices=value), [4, -1, 0], [[5, 0, 1], [3, 3, 1]]),
    "state_indices of a convolution": (
        lambda value: ejx.CausalConv1d(platform="xla").step(_X[:3], normal(6, 6, 4), None, normal(8, 5, 3, 6), state_indices=value),
        [4, -1, 0], [[5, 0, 1], [3, 3, 1]]),
    "lengths of pooled rows": (
        lambda value: ejx.MeanPooling(platform="xla")(normal(3, 3, T, 6), lengths=value), [0, 4, T], [[0, 0, T + 1], [-1, 0, 0]]),
    "segment_ids of pooled tokens": (
        lambda value: ejx.MeanPooling(num_segments=4, platform="xla")(_X[:3], segment_ids=value), [3, -5, 0], [[3, 4, 0]]),
    "segment_ids of sorted tokens": (
        lambda value: ejx.MeanPooling(num_segments=4, indices_are_sorted=True, platform="xla")(_X[:4], segment_ids=value),
        [-1, 0, -1, 3], [[0, 2, -1, 1]]),
    "lengths of a cell": (lambda value: ejx.Recurrent("rnn", platform="xla")(_X[None], normal(6, 6, 6), lengths=value), [T], [[T + 1], [-1]]),
    "state_indices of a cell": (
        lambda value: ejx.Recurrent("rnn", platform="xla").step(_X[:3], normal(6, 6, 6), None, normal(8, 5, 6), state_indices=value),
        [4, -1, 0], [[5, 0, 1], [3, 3, 1]]),
}  # fmt: skip


def refuses(call, value, inside=True) -> str:
    """The words of the error, the same for a numpy array, a JAX array, and (`inside`) those that a jitted function closes over."""
    messages = set()
    for given in (np.asarray(value, np.int32), jnp.asarray(value, jnp.int32)):
        for run in (lambda call: call(), jax.eval_shape)[: 1 + inside]:
            with pytest.raises(ValueError) as caught:
                run(lambda given=given: call(given))
            messages.add(str(caught.value))
    (message,) = messages
    assert re.fullmatch(r"[\w.]+: expected [^;]*, received [^;]*; [^;]*\.", message), message
    return message


@pytest.mark.few(24)
@pytest.mark.parametrize("fault", WRONG_OFFSETS)
@pytest.mark.parametrize("family", PACKED)
def test_wrong_offsets(family, fault):
    # A mask made inside has arrays of the trace before it meets the tokens.
    message = refuses(
        PACKED[family], WRONG_OFFSETS[fault], inside=(family, fault) != ("mask", "past the end")
    )
    expected = "at most" if fault == "past the end" else "never decrease"
    assert expected in message


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name):
    call, right, wrong = NUMBERS[name]
    jax.eval_shape(lambda: call(np.asarray(right, np.int32)))
    for value in wrong:
        inside = not name.startswith("mask") or value[0] < 0
        assert refuses(call, value, inside).startswith(
            name.split(" ")[0].removeprefix("mask." if value[0] < 0 else "") + ": "
        )


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [name for name in PACKED if name != "keys"])
def test_tokens_outside_all_offsets_are_padding(family):
    """Before the first and behind the last, in every family: the sequences get what they get without them."""
    call = quick(lambda value: jnp.asarray(PACKED[family](value)).astype(jnp.float32))
    if family == "pages":
        assert not np.asarray(call(jnp.array([2, 4, 8, 12])))[[0, 1, 12, 13]].any()
        return
    whole, part = call(jnp.array([0, 3, 9, T])), call(jnp.array([3, 3, 9, 9]))
    inside = slice(3, 9)
    np.testing.assert_allclose(
        part[inside], whole[inside] if family != "sequences" else 1, rtol=1e-5, atol=1e-5
    )
    hidden = np.asarray(part)[[0, 1, 2, 9, T - 1]]
    assert (hidden == (-1 if family == "sequences" else 0)).all()


TRACED = {
    "attention": (PACKED["attention"], [0, 10, 5, 16], [0, 4, 8, T], "cu_seqlens: expected offsets that never decrease"),
    "convolution": (PACKED["convolution"], [0, 4, 8, 17], [0, 4, 8, T], "cu_seqlens: expected offsets of at most"),
    "pages": (PACKED["pages"], [0, 4, 3, 16], [0, 4, 9, 0], "query_start_loc: expected offsets that never decrease"),
    "lengths": (NUMBERS["kv_lengths"][0], [S + 1], [S], f"kv_lengths: expected numbers from 0 to {S}"),
    "slots": (append, [7, 3, 7], [7, 3, 6], "slots: expected distinct numbers"),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "pages" else ()) for n in TRACED]
)
def test_traced_values_are_checked_on_request(name):
    call, wrong, right, words = TRACED[name]
    wrong, right = (jnp.asarray(x, jnp.int32) for x in (wrong, right))
    unasked = eqx.filter_jit(call)
    unasked(wrong)  # nobody asked
    with ejx.check_values():
        asked = eqx.filter_jit(lambda value: call(value))
        jax.tree.map(assert_close, asked(right), unasked(right))
    with pytest.raises((RuntimeError, ValueError), match=re.escape(words)):
        asked(wrong)


def test_who_asks(monkeypatch):
    wrong, variable = jnp.array([0, 10, 5, 16]), "EJKERNEL_EQX_CHECK_VALUES"
    of = lambda: str(jax.make_jaxpr(lambda value: sequences.cu_seqlens_to_segment_ids(value, T))(wrong))
    plain = of()
    monkeypatch.setenv(variable, "1")
    asked = of()
    with ejx.check_values(False):
        assert of() == plain and len(asked) > len(plain)
    monkeypatch.setenv(variable, "off")
    assert of() == plain
    with ejx.check_values():
        assert of() == asked
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(ValueError, match=f"environment variable {variable}: expected one of 1, true"):
        of()
    with pytest.raises(ValueError, match=r"^enabled: expected True or False, received 1"):
        ejx.check_values(1).__enter__()  # pyright: ignore[reportArgumentType]
    assert variable in [known.name for known in ejx.env()]


def test_ids_that_32_bits_do_not_hold():
    ids: Any = np.zeros(T, np.int64)
    ids[5:] = 2**32  # the same as 0 in 32 bits
    for call in (
        lambda: flash(segment_ids=ids),
        lambda: ejx.GatedLinearAttention(platform="xla")(*QKV, decay(T, 2, 16), segment_ids=ids),
        lambda: sequences.segment_positions(ids),
    ):
        with pytest.raises(ValueError, match=r"^segment_ids: expected numbers from -2147483648 to"):
            call()


def test_a_vmapped_check():
    offsets = jnp.array([[0, 4, 8, T], [0, 9, 8, T]])
    with ejx.check_values():
        call = eqx.filter_jit(jax.vmap(PACKED["sequences"]))
        with pytest.raises((RuntimeError, ValueError), match="cu_seqlens: expected offsets that never"):
            call(offsets)
