"""Operations with what they take, for tests of what holds for all of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx
from tests.attention.dense import normal

T, H, D = 9, 2, 8
_decay, _strength = (lambda x: -jnp.exp(x)), jax.nn.sigmoid
_QKV = ((T, H, D), (T, H, D), (T, H, D))


def _scan(**options: Any) -> Any:
    op = ejx.StateSpaceV1(**options)
    return lambda x, dt, B, C, A, **packing: op(x, dt, A, B, C, **packing)


def _state_space(**options: Any) -> Any:
    op = ejx.StateSpaceV2(norm="group", **options)
    return lambda x, dt, B, C, z, A, weight, **packing: op(x, dt, A, B, C, z=z, norm_weight=weight, **packing)


# What builds an operation; the arguments that each sequence has for itself, as shapes or with what is made of normal numbers; those of all.
OPERATIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "attention": (functools.partial(ejx.FlashAttention, causal=True, sliding_window=5), [*_QKV], []),
    "one query": (functools.partial(ejx.FlashAttention, causal=True), [(1, H, D), *_QKV[1:]], []),
    "sparse": (functools.partial(ejx.NativeSparseAttention, block_size=2, num_blocks=2, sliding_window=3), [*_QKV, (T, H, 3)], []),
    "delta": (ejx.GatedDeltaRule, [*_QKV, ((T, H), _decay), ((T, H), _strength)], []),
    "delta by channel": (ejx.KernelDeltaAttention, [*_QKV, ((T, H, D), _decay), ((T, H), _strength)], []),
    "linear": (ejx.GatedLinearAttention, [*_QKV, ((T, H, D), _decay)], []),
    "normalised": (functools.partial(ejx.LinearAttention, normalize=True), [(s, jnp.abs) for s in _QKV], []),
    "state space": (_state_space, [(T, H, D), ((T, H), jnp.exp), (T, 1, D), (T, 1, D), (T, H, D)], [((H,), _decay), (H, D)]),
    "scan": (_scan, [(T, 6), ((T, 6), jnp.exp), (T, 4), (T, 4)], [((6, 4), _decay)]),
    "convolution": (ejx.CausalConv1d, [(T, 6)], [(6, 4)]),
    "cells": (functools.partial(ejx.Recurrent, cell="gru"), [(T, 18)], [(18, 6)]),
    "pooling": (functools.partial(ejx.MeanPooling, chunk_size=4), [(T, 6)], []),
    "norm": (ejx.GatedRMSNorm, [(T, 6), (T, 6)], []),
}  # fmt: skip


def arrays_of(entries: list[Any], seed: int, scale: float, *lead: int) -> list[jax.Array]:
    entries = [entry if callable(entry[-1]) else (entry, lambda x: x) for entry in entries]
    return [make(scale * normal(seed + i, *lead, *shape)) for i, (shape, make) in enumerate(entries)]


@functools.cache
def made(name: str, platform: str = "xla") -> tuple[Any, list[jax.Array]]:
    """An operation and its arguments, of one row of tokens."""
    build, own, shared = OPERATIONS[name]
    return build(platform=platform), [*arrays_of(own, 0, 1.0), *arrays_of(shared, 20, 1.0)]
