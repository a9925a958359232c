"""The expanded form's Pallas kernels for TPUs that are not there: every configuration lowers, and the defaults compile for every generation."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

from ejkernel_eqx.attention.pallas import tile_sizes
from ejkernel_eqx.attention.pallas.compiled import PallasConfig
from ejkernel_eqx.attention.spec import AttentionSpec, RowRanges
from ejkernel_eqx.latent.core import problem_of
from ejkernel_eqx.latent.pallas import compiled
from ejkernel_eqx.latent.spec import LatentArrays
from tests.tpus import compile_ahead, FACTS, GENERATIONS, launches_of, lower, needs_libtpu

Call = tuple[LatentArrays, AttentionSpec]
DEEPSEEK = (128, 64, 128)


def call_of(
    on: bool, length: int = 1024, dims: tuple[int, int, int] = DEEPSEEK, dtype: str = "bfloat16"
) -> Call:
    """All flags off but for a causal window, or all on; `dims` are those of a key without and with a rotation, and of a value."""
    shape: Any = lambda *sizes, of=dtype: jax.ShapeDtypeStruct(sizes, of)
    (nope, rope, values), B, H = dims, 2, 4
    arrays = LatentArrays(
        shape(B, length, H, nope + rope),
        shape(B, length, H, nope),
        shape(B, length, rope),
        shape(B, length, H, values),
    )
    spec = AttentionSpec((nope + rope) ** -0.5, right=0)
    if on:
        ids, scores = shape(B, length, of="int32"), shape(1, H, of="float32")
        arrays = arrays._replace(
            bias=shape(1, H, length, length),
            alibi_slopes=scores,
            sinks=scores,
            mask=shape(B, 1, length, length, of="bool"),
            q_segments=ids,
            kv_segments=ids,
            rows=RowRanges(ids, ids, ids),
            seeds=shape(B, H, 2, of="uint32"),
            blocks=shape(B, H, -(-length // 64), -(-length // 96), of="bool"),
        )
        spec = dataclasses.replace(
            spec, right=None, logits_soft_cap=30.0, dropout_rate=0.1, block_size=(64, 96)
        )
    return arrays, spec


def both(spec: AttentionSpec, config: PallasConfig, arrays: LatentArrays, **execute: Any) -> Any:
    out, lse = compiled.forward(arrays, spec, config, **execute)
    return out, compiled.backward(arrays, spec, config, out, lse, out, lse, **execute)


def default_of(generation: str, call: Call) -> PallasConfig:
    return compiled.default_config(problem_of("multi_head_latent_attention", *call), FACTS[generation])


@pytest.mark.few(1)
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("dims", [DEEPSEEK, (96, 32, 80), (192, 64, 256)], ids=str)
def test_lowers(dims, on):
    arrays, spec = call_of(on, 256, dims)
    text = lower(functools.partial(both, spec, default_of("v4", (arrays, spec))), arrays).as_text()
    assert all(f"ejkernel_eqx.attention.{name}" in text for name in tile_sizes.KERNELS)


@pytest.mark.slow
def test_every_candidate_lowers():
    arrays, spec = call_of(False, 4096)
    problem = problem_of("multi_head_latent_attention", arrays, spec)
    configs = {config for facts in FACTS.values() for config in compiled.candidates(problem, facts)}
    assert len(configs) > 5
    for config in configs:
        lower(functools.partial(both, spec, config), arrays)


@needs_libtpu
@pytest.mark.parametrize("on", [False, True], ids=("off", "on"))
@pytest.mark.parametrize("generation", GENERATIONS)
def test_defaults_compile(generation, on):
    arrays, spec = call_of(on, 256 if on else 1024)
    compile_ahead(generation, functools.partial(both, spec, default_of(generation, (arrays, spec))), arrays)


@needs_libtpu
def test_parts_that_fill_no_registers_compile():
    arrays, spec = call_of(False, dims=(16, 8, 12))
    compile_ahead("v4", functools.partial(both, spec, default_of("v4", (arrays, spec))), arrays)


@pytest.mark.parametrize("on", [False, True])
def test_the_estimate_of_vmem_covers_what_is_launched(on):
    call = call_of(on)
    problem, config = problem_of("multi_head_latent_attention", *call), default_of("v5e", call)
    found = launches_of(functools.partial(both, call[1], config), call[0])
    for kernel in tile_sizes.KERNELS:
        launch, shapes = found[f"attention.{kernel}"]
        tile = getattr(config, kernel)
        estimate = tile_sizes.vmem(kernel, problem, (tile.block_q, tile.block_k))
        assert launch.vmem([x.dtype for x in shapes[launch.scalars :]]) <= 1.1 * estimate, kernel


def test_what_it_does_not_take():
    problem = problem_of("multi_head_latent_attention", *call_of(False, dims=(224, 64, 128)))
    assert "head dims up to 256, not D 288" in str(compiled.unsupported(problem, FACTS["v6e"]))
