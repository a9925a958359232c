"""Layers of published models give what `transformers` gives: live where it is installed, and by what it gave."""

import importlib.util

import equinox as eqx
import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.weights import unit_offset_norms
from tests.tolerances import assert_close
from tests.weights.make_golden import read
from tests.weights.published import CASES, live, Published

NAMES = list(CASES)
needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="compares with transformers, which the extra of that name installs",
)


def layer_of(name: str, published: Published, abstract: bool = False):
    case = CASES[name]
    options = {"layer_index": case.layer_index, "platform": "xla", "key": jax.random.key(1)}
    make = lambda: case.layer.from_config(published.config, **options)
    # A lightning layer's place is a value that no weights give.
    like = eqx.filter_eval_shape(make) if abstract and name != "minimax" else make()
    offset = unit_offset_norms(published.config)
    prefix = f"model.layers.{case.layer_index}.mixer"
    return ejx.load_published(like, published.state_dict(f"{prefix}."), prefix, unit_offset_norms=offset)


def check(name: str, published: Published, **options):
    run = eqx.filter_jit(lambda layer, x: layer(x))  # one program is compiled sooner than its parts
    y = np.asarray(run(layer_of(name, published, **options), jax.numpy.asarray(published.x)))
    assert_close(y, published.y)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    check(name, read(name), abstract=True)


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_live(name):
    check(name, live(name))


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "minimax", "kimi_linear"])
def test_golden_files_are_of_today(name):
    new, kept = live(name), read(name)
    assert new.shapes == kept.shapes
    assert_close(new.y, kept.y)
