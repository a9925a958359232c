"""Engines of models over several devices: the tokens of one."""

from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from ejkernel_eqx.models import place, Sampling, Speculation
from ejkernel_eqx.serving import Engine

from .engines import model_of, requests_of, serve

SIZES: Any = {"num_pages": 40, "page_size": 4, "max_batch": 4, "step_tokens": 8}


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("mixer", ["attention", "delta,attention"])
def test_an_engine_over_devices(kind, mixer):
    """Keys are split by heads, and the vocabulary, whose logits are sorted where tokens are drawn."""
    model, requests = model_of(mixer, 2 if "," in mixer else 1, "xla"), requests_of(0, 4, longest=12, most=5)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(getattr(AxisType, kind),), devices=jax.devices()[:2])
    placed = Engine(place(model, model, mesh), **SIZES)
    options: dict[str, Any]
    for options in ({}, {"sampling": Sampling(1.0, 50, 0.95, seed=7)}):
        assert serve(placed, requests, **options) == serve(Engine(model, **SIZES), requests, **options)
    assert any("tensor" in x.sharding.spec for x in jax.tree.leaves(placed.state.caches))


@pytest.mark.slow
def test_programs_over_devices():
    """Once `warm_up` is done, nothing is compiled; only the first program was compiled twice. Drafts change no token."""
    model, requests = model_of("attention", 1, "xla"), requests_of(1, 4, longest=12, most=8)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    placed = Engine(place(model, model, mesh), **SIZES, speculate=Speculation())
    placed.warm_up()
    compiled = dict(placed.compiled)
    assert sorted(compiled.values()) == [1] * (len(compiled) - 1) + [2]
    assert serve(placed, requests) == serve(Engine(model, **SIZES), requests)
    assert dict(placed.compiled) == compiled
