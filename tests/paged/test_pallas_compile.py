"""The TPU's kernels without a TPU: every default and candidate lowers, defaults compile for every generation, and pages are read in place."""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import pytest

import ejkernel_eqx as ejx
from tests.paged.cases import example_problem, make_arrays, PagedArrays, PAGES, SCALES, spec_of_problem
from tests.tpus import compile_ahead, FACTS, GENERATIONS, lower, needs_libtpu

compiled = ejx.kernel_registry.get("paged_attention", "pallas").load()
ALL: dict[str, Any] = dict(window=True, soft_cap=True, sinks=True)
DECODE, CHUNKS = dict(N=16, S=4096), dict(N=8, T=1000, Q=512, S=4096)
LATENT: dict[str, int] = dict(H=16, D=576, V=512, p=64)
OF_INT8: dict[str, Any] = dict(scales="token", kv="int8")
PROBLEMS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "decode": (DECODE | dict(H=32, K=8, D=128), "bfloat16", {}),
    "decode, all flags": (DECODE | dict(H=64, K=8, D=64), "float32", ALL),
    "large pages": (DECODE | dict(H=16, K=2, D=128, p=256), "bfloat16", {}),
    "latent": (DECODE | LATENT, "bfloat16", dict(latent=True)),
    "three key heads": (DECODE | dict(H=12, K=3, D=128), "bfloat16", {}),
    "wide heads": (DECODE | dict(H=8, K=2, D=256), "bfloat16", {}),
    "one wide head": (DECODE | dict(H=8, K=1, D=256), "float32", {}),
    "int8": (DECODE | dict(H=32, K=8, D=128), "bfloat16", ALL | OF_INT8),
    "float8": (DECODE | dict(H=8, K=1, D=128), "bfloat16", dict(scales="head", kv="float8_e4m3fn")),
    "large pages, int8": (DECODE | dict(H=32, K=4, D=128, p=128), "bfloat16", OF_INT8),
    "mixed": (CHUNKS | dict(H=32, K=8, D=128), "bfloat16", {}),
    "mixed, all flags": (CHUNKS | dict(H=16, K=4, D=64, p=64), "float32", ALL),
    "mixed, one key head": (CHUNKS | dict(H=8, K=1, D=128), "bfloat16", ALL),
    "mixed, latent int8": (CHUNKS | LATENT, "bfloat16", dict(latent=True) | OF_INT8),
    "mixed, float8": (
        CHUNKS | dict(H=16, K=4, D=128, p=32), "bfloat16", ALL | dict(scales="head", kv="float8_e5m2")
    )
}  # fmt: skip


def problem_of(name: str) -> ejx.Problem:
    dims, dtype, flags = PROBLEMS[name]
    operation = "ragged_paged_attention" if "T" in dims else "paged_attention"
    return example_problem(operation, dims, dtype, flags)


def shapes_of(problem: ejx.Problem) -> PagedArrays:
    """The shapes of a call, with one leading axis where kernels have it."""

    return jax.eval_shape(functools.partial(make_arrays, problem, 0))


# For every generation one of the kernels without flags and the other with all, the others for one each.
EVERYWHERE = (("decode", "mixed, all flags"), ("decode, all flags", "mixed"))
OTHERS = [name for name in PROBLEMS if name not in itertools.chain(*EVERYWHERE)]
COMPILED = [
    (name, generation)
    for names, generation in zip(itertools.cycle(EVERYWHERE), GENERATIONS)
    for name in names
]
COMPILED += list(zip(OTHERS, itertools.cycle(GENERATIONS)))
LOWERED = ("decode", "int8", "mixed, all flags", "latent")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOWERED)
def test_every_candidate_lowers(name):
    problem = problem_of(name)
    arrays, spec = shapes_of(problem), spec_of_problem(problem)
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
    arrays, spec = shapes_of(problem), spec_of_problem(problem)
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
