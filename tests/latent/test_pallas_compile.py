"""The expanded form's Pallas kernels for TPUs that are not there: every configuration lowers, and the defaults compile for every generation."""

import functools
from typing import Any

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.pallas import tile_sizes
from tests.latent.cases import call_of, DEEPSEEK, EVERY, OPERATION
from tests.tpus import compile_ahead, FACTS, GENERATIONS, launches_of, lower, needs_libtpu

compiled = ejx.kernel_registry.get(OPERATION, "pallas").load()


def both(spec: Any, config: Any, arrays: Any) -> Any:
    out, lse = compiled.forward(arrays, spec, config)
    return out, compiled.backward(arrays, spec, config, out, lse, out, lse)


def call_with_default(generation: str, length: int, *flags: str, dims: Any = DEEPSEEK) -> Any:
    """A function that calls the kernels forward and backward, and its arrays; the problem and the configuration."""
    arrays, spec, problem = call_of(length, *flags, dims=dims)
    config = compiled.default_config(problem, FACTS[generation])
    return functools.partial(both, spec, config), arrays, problem, config


flags = pytest.mark.parametrize("flags", [(), EVERY], ids=("off", "on"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "dims, flags", [(DEEPSEEK, EVERY), ((96, 32, 80), ()), ((192, 64, 256), EVERY)], ids=str
)
def test_lowers(dims, flags):
    call, arrays, *_ = call_with_default("v4", 256, *flags, dims=dims)
    text = lower(call, arrays).as_text()
    assert all(f"ejkernel_eqx.attention.{name}" in text for name in tile_sizes.KERNELS)


@pytest.mark.slow
def test_every_candidate_lowers():
    arrays, spec, problem = call_of(4096)
    configs = {config for facts in FACTS.values() for config in compiled.candidates(problem, facts)}
    assert len(configs) > 5
    for config in configs:
        lower(functools.partial(both, spec, config), arrays)


@needs_libtpu
@pytest.mark.parametrize(
    "generation, flags",
    [(name, EVERY) for name in GENERATIONS] + [(name, ()) for name in (GENERATIONS[0], GENERATIONS[-1])],
)
def test_defaults_compile(generation, flags):
    call, arrays, *_ = call_with_default(generation, 256 if flags else 1024, *flags)
    compile_ahead(generation, call, arrays)


@needs_libtpu
def test_parts_that_fill_no_registers_compile():
    call, arrays, *_ = call_with_default("v4", 1024, dims=(16, 8, 12))
    compile_ahead("v4", call, arrays)


@flags
def test_the_estimate_of_vmem_covers_what_is_launched(flags):
    call, arrays, problem, config = call_with_default("v5e", 1024, *flags)
    found = launches_of(call, arrays)
    for kernel in tile_sizes.KERNELS:
        launch, shapes = found[f"attention.{kernel}"]
        tile = getattr(config, kernel)
        estimate = tile_sizes.vmem(kernel, problem, (tile.block_q, tile.block_k))
        assert launch.vmem([x.dtype for x in shapes[launch.scalars :]]) <= 1.1 * estimate, kernel


def test_what_it_does_not_take():
    problem = call_of(1024, dims=(224, 64, 128))[2]
    assert "head dims up to 256, not D 288" in str(compiled.unsupported(problem, FACTS["v6e"]))
