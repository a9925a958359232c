"""The TPU's kernels without a TPU: every default and candidate lowers, defaults compile for every generation, and pages are read in place."""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import pytest

from ejkernel_eqx.dispatch import Problem
from ejkernel_eqx.paged.example import example_problem
from ejkernel_eqx.paged.pallas import compiled
from ejkernel_eqx.paged.samples import make_arrays, spec_of
from ejkernel_eqx.paged.spec import PagedArrays, PAGES, SCALES
from tests.tpus import compile_ahead, FACTS, GENERATIONS, lower, needs_libtpu

ALL: dict[str, Any] = dict(window=True, soft_cap=True, sinks=True)
DECODE: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "decode": (dict(N=64, S=4096, H=32, K=8, D=128), "bfloat16", {}),
    "decode, all flags": (dict(N=64, S=4096, H=32, K=8, D=128), "bfloat16", ALL),
    "narrow heads": (dict(N=16, S=4096, H=64, K=8, D=64), "bfloat16", ALL),
    "many key heads": (dict(N=16, S=4096, H=32, D=128, p=64), "bfloat16", {}),
    "one key head": (dict(N=16, S=4096, H=8, K=1, D=256, p=32), "bfloat16", {}),
    "large pages": (dict(N=16, S=4096, H=16, K=2, D=128, p=256), "bfloat16", {}),
    "float32": (dict(N=16, S=4096, H=16, K=4, D=128), "float32", ALL),
    "latent": (dict(N=16, S=4096, H=16, D=576, V=512, p=64), "bfloat16", dict(latent=True)),
    "three key heads": (dict(N=16, S=4096, H=12, K=3, D=128), "bfloat16", {}),
    "twelve key heads": (dict(N=16, S=4096, H=24, K=12, D=128), "bfloat16", {}),
    "wide heads": (dict(N=16, S=4096, H=8, K=2, D=256), "bfloat16", {}),
    "one wide head": (dict(N=16, S=4096, H=8, K=1, D=256), "float32", {}),
}
MIXED: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "mixed": (dict(N=32, T=2048, Q=1024, S=4096, H=32, K=8, D=128), "bfloat16", {}),
    "mixed, all flags": (dict(N=32, T=2048, Q=1024, S=4096, H=32, K=8, D=128), "bfloat16", ALL),
    "mixed, narrow heads": (dict(N=8, T=1000, Q=512, S=4096, H=16, K=4, D=64, p=64), "bfloat16", ALL),
    "mixed, many key heads": (dict(N=8, T=1000, Q=512, S=4096, H=16, D=128), "bfloat16", {}),
    "mixed, one key head": (dict(N=8, T=1000, Q=512, S=4096, H=8, K=1, D=128), "bfloat16", ALL),
    "mixed, float32": (dict(N=8, T=1000, Q=512, S=4096, H=8, K=2, D=128), "float32", {}),
    "mixed, latent": (
        dict(N=8, T=512, Q=256, S=4096, H=16, D=576, V=512, p=64),
        "bfloat16",
        dict(latent=True),
    ),
}
BYTES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "int8": (dict(N=32, S=4096, H=32, K=8, D=128), "bfloat16", ALL | dict(scales="token", kv="int8")),
    "float8": (
        dict(N=32, S=4096, H=8, K=1, D=128),
        "bfloat16",
        dict(scales="head", kv="float8_e4m3fn"),
    ),
    "two heads, int8": (dict(N=16, S=4096, H=8, K=2, D=128), "bfloat16", dict(scales="head", kv="int8")),
    "large pages, int8": (
        dict(N=16, S=4096, H=32, K=4, D=128, p=128),
        "bfloat16",
        dict(scales="token", kv="int8"),
    ),
    "mixed, int8": (
        dict(N=8, T=1000, Q=512, S=4096, H=32, K=8, D=128),
        "bfloat16",
        dict(scales="token", kv="int8"),
    ),
    "mixed, float8": (
        dict(N=8, T=1000, Q=512, S=4096, H=16, K=4, D=128, p=32),
        "bfloat16",
        ALL | dict(scales="head", kv="float8_e5m2"),
    ),
    "mixed, latent int8": (
        dict(N=8, T=512, Q=256, S=4096, H=16, D=576, V=512, p=64),
        "bfloat16",
        dict(latent=True, scales="token", kv="int8"),
    ),
}
PROBLEMS = DECODE | MIXED | BYTES


def problem_of(name: str) -> Problem:
    dims, dtype, flags = PROBLEMS[name]
    operation = "ragged_paged_attention" if "T" in dims else "paged_attention"
    return example_problem(operation, dims, dtype, flags)


def shapes_of(problem: Problem) -> PagedArrays:
    """The shapes of a call, with one leading axis where kernels have it."""

    return jax.eval_shape(functools.partial(make_arrays, problem, 0))


# Those of both kernels without and with all flags for every generation, the others for one each.
EVERYWHERE = ("decode", "decode, all flags", "mixed", "mixed, all flags")
OTHERS = [name for name in PROBLEMS if name not in EVERYWHERE]
COMPILED = [(name, generation) for name in EVERYWHERE for generation in GENERATIONS]
COMPILED += list(zip(OTHERS, itertools.cycle(GENERATIONS)))
LOWERED = (*EVERYWHERE, "large pages", "latent", "int8", "mixed, float8", "mixed, latent int8")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOWERED)
def test_every_candidate_lowers(name):
    problem = problem_of(name)
    arrays, spec = shapes_of(problem), spec_of(problem)
    found = {}
    for facts in FACTS.values():
        assert compiled.unsupported(problem, facts) is None
        configs = compiled.candidates(problem, facts)
        assert configs[0] == compiled.default_config(problem, facts)
        assert all(compiled.config_unsupported(config, problem, facts) is None for config in configs)
        # Two cores change the grid alone.
        found |= {dataclasses.replace(config, cores=1): config for config in configs}
    for config in found.values():
        lower(lambda x, config=config: compiled.forward(x, spec, config), arrays)


@needs_libtpu
@pytest.mark.parametrize("name, generation", COMPILED)
def test_defaults_compile(name, generation):
    """And pages and scales are copied by XLA only where `explain` says so."""
    problem, facts = problem_of(name), FACTS[generation]
    arrays, spec = shapes_of(problem), spec_of(problem)
    config = compiled.default_config(problem, facts)
    text = compile_ahead(generation, lambda x: compiled.forward(x, spec, config), arrays).as_text()
    made = re.findall(r"= \w+\[([\d,]+)\]\S+ (?:copy|fusion|reshape|transpose)\(", text)
    sizes = {math.prod(map(int, shape.split(","))) for shape in made}
    names = (*PAGES, *(SCALES if spec.scales == "token" else ()))
    pages = {x.size for name in names if (x := getattr(arrays, name)) is not None}
    assert bool(sizes & pages) == bool(compiled.remark(config, problem, facts))


@pytest.mark.parametrize(
    "name, words",
    [
        ("decode", ""),
        ("latent", "each compiled program copies all of them once"),
        ("three key heads", "pages of 3 key heads of 128 channels in another order"),
        (
            "wide heads",
            "of 256 channels in another order than the kernels read, so that every call copies all of them",
        ),
        ("int8", "every call copies all scales for each token"),
        ("large pages, int8", ""),
    ],
)
def test_what_is_said_of_copies(name, words):
    problem = problem_of(name)
    told = compiled.remark(compiled.default_config(problem, FACTS["v5e"]), problem, FACTS["v5e"])
    assert words in told and bool(words) == bool(told)
