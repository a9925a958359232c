"""The Pallas kernels of attention for TPUs that are not there: every configuration lowers, and the defaults compile for every generation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.attention.inner import AttentionArrays, AttentionSpec, cdiv, problem_of, RowRanges
from tests.attention.pallases import compiled, PallasConfig, tile_sizes, TileConfig
from tests.tpus import compile_ahead, FACTS, GENERATIONS, launches_of, lower, needs_libtpu

Call = tuple[AttentionArrays, AttentionSpec]


def call_of(flags: str, T: int = 1024, D: int = 128, V: int = 128, dtype: str = "bfloat16") -> Call:
    """All flags off but for a causal window, all on, or a few."""
    shape: Any = lambda *sizes, of=dtype: jax.ShapeDtypeStruct(sizes, of)
    B, H, K, S = 2, 4, 2, T + 128
    arrays = AttentionArrays(shape(B, T, H, D), shape(B, S, K, D), shape(B, S, K, V))
    spec = AttentionSpec(D**-0.5, right=0, offset=S - T)
    whole = shape(B, T, of="int32")
    terms: dict[str, Any] = dict(
        bias=shape(1, H, T, S), alibi_slopes=shape(1, H, of="float32"), sinks=shape(1, H, of="float32")
    )
    if flags in ("scores", "on"):
        arrays = arrays._replace(**terms, seeds=shape(B, H, 3, of="uint32"))
        spec = dataclasses.replace(spec, logits_soft_cap=30.0, dropout_rate=0.1)
    if flags in ("masks", "on"):
        rows = RowRanges(whole, whole, whole)
        segments: dict[str, Any] = dict(q_segments=whole, kv_segments=shape(B, S, of="int32"))
        arrays = arrays._replace(rows=rows, mask=shape(B, 1, T, S, of="bool"), **segments)
        spec = dataclasses.replace(spec, right=None, offset=0)
    if flags in ("blocks", "on"):
        arrays = arrays._replace(blocks=shape(B, H, cdiv(T, 64), cdiv(S, 96), of="bool"))
        spec = dataclasses.replace(spec, block_size=(64, 96))
    return arrays, spec


FLAGS = ("off", "scores", "masks", "blocks", "on")


def both(spec: AttentionSpec, config: PallasConfig, arrays: AttentionArrays) -> Any:
    out, lse = compiled.forward(arrays, spec, config)
    return out, compiled.backward(arrays, spec, config, out, lse, out, lse)


def default_of(generation: str, call: Call) -> PallasConfig:
    return compiled.default_config(problem_of("flash_attention", *call), FACTS[generation])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "flags, dims", [("off", (64, 64)), ("scores", (80, 80)), ("masks", (192, 128)), ("on", (256, 256))]
)
def test_lowers(flags, dims):
    arrays, spec = call_of(flags, 256, *dims)
    text = lower(functools.partial(both, spec, default_of("v4", (arrays, spec))), arrays).as_text()
    kernels = {"forward", "key_gradient", "query_gradient"} | (
        {"bias_gradient"} if flags in ("scores", "on") else set()
    )
    assert {
        name for name in ("bias_gradient", *tile_sizes.KERNELS) if f"ejkernel_eqx.attention.{name}" in text
    } == kernels


@needs_libtpu
@pytest.mark.parametrize(
    "generation, flags, dims",
    [(name, "on", (80, 80)) for name in GENERATIONS]
    + [(name, "off", (128, 128)) for name in (GENERATIONS[0], GENERATIONS[-1])],
)
def test_defaults_compile(generation, flags, dims):
    arrays, spec = call_of(flags, 1024 if flags == "off" else 128, *dims)
    compile_ahead(generation, functools.partial(both, spec, default_of(generation, (arrays, spec))), arrays)


def test_vmem_decides_tiles():
    """A device with less memory gets smaller tiles."""
    call = call_of("off", 4096, 256, 256, "float32")
    problem = problem_of("flash_attention", *call)
    small, large = (compiled.default_config(problem, FACTS[name]) for name in ("v4", "v5e"))
    area = lambda config: config.key_gradient.block_q * config.key_gradient.block_k
    assert area(small) < area(large)
    for generation, config in (("v4", small), ("v5e", large)):
        assert compiled.config_unsupported(config, problem, FACTS[generation]) is None
    huge = TileConfig(4096, 4096)
    reason = compiled.config_unsupported(PallasConfig(huge, huge, huge), problem, FACTS["v4"])
    assert "forward with 4096x4096 tiles takes about" in str(reason)


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_estimate_of_vmem_covers_what_is_launched(flags):
    call = call_of(flags)
    problem, config = problem_of("flash_attention", *call), default_of("v5e", call)
    for name, (launch, shapes) in launches_of(functools.partial(both, call[1], config), call[0]).items():
        kernel = name.removeprefix("attention.")
        if kernel in tile_sizes.KERNELS:
            tile = getattr(config, kernel)
            dtypes = [x.dtype for x in shapes[launch.scalars :]]
            estimate = tile_sizes.vmem(kernel, problem, (tile.block_q, tile.block_k))
            assert launch.vmem(dtypes) <= 1.1 * estimate, kernel


def test_long_lists_of_steps_are_refused():
    arrays, spec = call_of("blocks", 128)
    wide = arrays._replace(**{n: jax.ShapeDtypeStruct((64, 65_536, 32, 64), jnp.bfloat16) for n in "qkv"})
    reason = compiled.unsupported(problem_of("block_sparse_attention", wide, spec), FACTS["v5e"])
    assert "scalar memory has room for" in str(reason)
