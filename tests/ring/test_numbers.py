"""Attention over several devices against dense attention of all tokens, in float64: results and every gradient."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.dense import causal, INTERPRET
from tests.ring.calls import compare, KINDS, OPTIONS, Options, T, together

# Compiling kernels takes most of the time: those of a few cases by default.
QUICK = ("plain", "segments", "alibi")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name, order",
    [
        pytest.param(name, ("contiguous", "zigzag")[n % 2], marks=() if name in QUICK else slow)
        for n, name in enumerate(OPTIONS)
    ],
)
def test_every_option_round_the_ring(name, order):
    compare(OPTIONS[name](), 4 if order == "contiguous" else 2, order=order)


@pytest.mark.parametrize("method", ["ring", pytest.param("all_to_all", marks=slow)])
def test_keys_that_ids_and_lengths_hide_together_may_be_nan(method):
    compare(together(OPTIONS["segments"](), OPTIONS["lengths"]()), 2, method=method)


@pytest.mark.parametrize(
    "name",
    [
        "two_sides",
        *(pytest.param(name, marks=slow) for name in ("segments", "offsets", "bias_of_keys", "dropout")),
    ],
)
def test_options_by_exchange(name):
    compare(OPTIONS[name](), 2, order="zigzag", method="all_to_all")


@slow
@pytest.mark.parametrize("n", range(len(KINDS)), ids=lambda n: KINDS[n])
def test_every_kind_of_mesh(n):
    compare(OPTIONS["soft_cap_and_sinks"](), 2, KINDS[n], method=("ring", "all_to_all")[n % 2])


@slow
@pytest.mark.parametrize("name, order", [("dropout", "contiguous"), ("lengths", "zigzag")])
def test_kernels(name, order):
    pytest.importorskip("triton")
    compare(OPTIONS[name](), 2, "manual", order=order, platform=INTERPRET)


@slow
@pytest.mark.parametrize(
    "t, s, devices, order", [(20, 44, 4, "contiguous"), (28, 12, 2, "zigzag"), (16, 48, 8, "zigzag")]
)
def test_different_numbers_of_queries_and_keys(t, s, devices, order):
    options = Options(
        {"causal": True}, dense={"seen": causal(t, s)}, hidden=(np.arange(t) + s - t < 0, False)
    )
    compare(options, devices, order=order, t=t, s=s)


@pytest.mark.parametrize(
    "kv_heads, devices", [(2, 4), pytest.param(8, 8, marks=slow), pytest.param(1, 8, marks=slow)]
)
def test_few_heads_are_repeated_for_an_exchange(kv_heads, devices):
    compare(OPTIONS["causal_only"](), devices, method="all_to_all", heads=8, kv_heads=kv_heads)


@slow
@pytest.mark.parametrize(
    "kind, order", [("explicit", "zigzag"), ("automatic", "contiguous"), ("manual", "zigzag")]
)
def test_packed_sequences_without_leading_axes(kind, order):
    ends, at = np.array([0, 5, 5, 17, 22]), np.arange(T)
    ids = np.searchsorted(ends, at, side="right")
    seen = (ids[:, None] == ids) & (at < 22) & causal(T, T)
    options = Options(
        {"causal": True}, {"cu_seqlens": jnp.asarray(ends)}, dense={"seen": seen}, hidden=(at >= 22, at >= 22)
    )
    compare(options, 4, kind, order, batch=0)


@slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    st.sampled_from(["causal_only", "window", "lengths"]),
    st.sets(st.sampled_from(["soft_cap_and_sinks", "alibi", "segments", "bias_of_keys", "dropout"]), min_size=2, max_size=3),
    st.sampled_from(["contiguous", "zigzag"]),
    st.sampled_from(["ring", "all_to_all"]),
)  # fmt: skip
def test_options_together(first, others, order, method):
    options = together(OPTIONS[first](), *(OPTIONS[name]() for name in sorted(others)))
    compare(options, 2, order=order, method=method)
