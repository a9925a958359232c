"""Padding takes no part, whatever its cotangents hold: the families beside attention, which has its own test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.recurrence.quick import quick

T = 10
IDS = np.array([-1, 0, 0, 0, -1, 1, 1, 1, -1, -1])
PACKINGS = {
    "segment_ids": (IDS, IDS >= 0),
    "cu_seqlens": (np.array([1, 4, 7]), (np.arange(T) >= 1) & (np.arange(T) < 7)),
}
_QKV = tuple(normal(seed, T, 2, 16) for seed in range(3))
_X = normal(5, T, 6)
_SCAN = (_X, jnp.ones((T, 6)), -jnp.ones((6, 4)), normal(6, T, 4), normal(7, T, 4))
_SSD = (_QKV[0], jnp.ones((T, 2)), -jnp.ones(2), *(normal(seed, T, 1, 8) for seed in (3, 4)))
FAMILIES = {
    "linear": (ejx.GatedLinearAttention, {}, (*_QKV, -jnp.ones((T, 2, 16))), {}),
    "delta": (ejx.DeltaRule, {}, (*_QKV, jnp.full((T, 2), 0.5)), {}),
    "normalised": (ejx.LinearAttention, dict(normalize=True), _QKV, {}),
    "gated and normed": (ejx.StateSpaceV2, dict(norm="group"), _SSD, dict(z=normal(8, T, 2, 16), norm_weight=jnp.ones((2, 16)))),
    "scan": (ejx.StateSpaceV1, {}, _SCAN, dict(z=normal(8, T, 6))),
    "convolution": (ejx.CausalConv1d, {}, (_X, normal(6, 6, 4)), {}),
    "cells": (ejx.Recurrent, dict(cell="rnn"), (_X, normal(6, 6, 6)), {}),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("platform", ["xla", pytest.param("triton-interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_cotangents_of_padding(family, platform, packing):
    if platform != "xla":
        pytest.importorskip("triton")
    make, options, operands, named = FAMILIES[family]
    given, real = PACKINGS[packing]
    op = make(**options, platform=platform)

    @quick
    def gradients(dout, operands, named):
        call = lambda operands, named: op(*operands, **named, **{packing: jnp.asarray(given)})[0]
        return jax.vjp(call, operands, named)[1](dout)

    tokens = real.reshape(T, *[1] * (operands[0].ndim - 1))
    dout = normal(9, *operands[0].shape)
    with_nan, without = (gradients(jnp.where(tokens, dout, x), operands, named) for x in (jnp.nan, 0.0))
    for found, wanted in zip(jax.tree.leaves(with_nan), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.isfinite(found).all() and np.asarray(found).any()
