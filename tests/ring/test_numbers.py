"""Attention over several devices against dense attention of all tokens, in float64: results and every gradient."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.dense import causal, INTERPRET
from tests.ring.calls import compare, KINDS, OPTIONS, Options, T, together

# Compiling kernels takes most of the time: those of a few cases by default.
QUICK = {("segments", "contiguous"), ("soft_cap_and_sinks", "zigzag")}


@pytest.mark.parametrize(
    "name, order",
    [
        pytest.param(name, order, marks=() if (name, order) in QUICK else pytest.mark.slow)
        for name in OPTIONS
        for order in ("contiguous", "zigzag")
    ],
)
def test_every_option_round_the_ring(name, order):
    compare(OPTIONS[name](), 4 if order == "contiguous" else 2, order=order)


@pytest.mark.parametrize("method", ["ring", pytest.param("all_to_all", marks=pytest.mark.slow)])
def test_keys_that_ids_and_lengths_hide_together_may_be_nan(method):
    compare(together(OPTIONS["segments"](), OPTIONS["lengths"]()), 2, method=method)


@pytest.mark.parametrize("order", ["zigzag"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "two_sides" else pytest.mark.slow)
        for name in OPTIONS
        if name != "bias_and_mask"
    ],
)
def test_every_option_by_exchange(name, order):
    compare(OPTIONS[name](), 2, order=order, method="all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_mesh(kind, method):
    compare(OPTIONS["soft_cap_and_sinks"](), 2, kind, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["causal_only", "dropout", "lengths"])
def test_kernels(name, order):
    pytest.importorskip("triton")
    compare(OPTIONS[name](), 2, "manual", order=order, platform=INTERPRET)


@pytest.mark.parametrize("devices, order", [(8, "contiguous")])
@pytest.mark.slow
def test_eight_devices(devices, order):
    compare(OPTIONS["two_sides"](), devices, order=order)


@pytest.mark.slow
@pytest.mark.parametrize(
    "t, s, devices, order",
    [
        *((20, 44, 4, "contiguous"), (28, 12, 2, "zigzag"), (8, 16, 8, "contiguous"), (16, 48, 8, "zigzag")),
        (24, 40, 4, "zigzag"),
    ],
)
def test_different_numbers_of_queries_and_keys(t, s, devices, order):
    options = Options(
        {"causal": True}, dense={"seen": causal(t, s)}, hidden=(np.arange(t) + s - t < 0, False)
    )
    compare(options, devices, order=order, t=t, s=s)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads, devices", [(4, 4), (2, 4), (1, 4), (8, 8), (1, 8)])
def test_few_heads_are_repeated_for_an_exchange(kv_heads, devices):
    compare(OPTIONS["causal_only"](), devices, method="all_to_all", heads=8, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "automatic", "manual"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_packed_sequences_without_leading_axes(kind, order):
    ends, at = np.array([0, 5, 5, 17, 22]), np.arange(T)
    ids = np.searchsorted(ends, at, side="right")
    seen = (ids[:, None] == ids) & (at < 22) & causal(T, T)
    options = Options(
        {"causal": True}, {"cu_seqlens": jnp.asarray(ends)}, dense={"seen": seen}, hidden=(at >= 22, at >= 22)
    )
    compare(options, 4, kind, order, batch=0)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.sampled_from(["causal_only", "window", "lengths"]),
    st.sets(
        st.sampled_from(["soft_cap_and_sinks", "alibi", "segments", "bias_of_keys", "dropout"]),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["contiguous", "zigzag"]),
    st.sampled_from(["ring", "all_to_all"]),
)
def test_options_together(first, others, order, method):
    options = together(OPTIONS[first](), *(OPTIONS[name]() for name in sorted(others)))
    compare(options, 2, order=order, method=method)
