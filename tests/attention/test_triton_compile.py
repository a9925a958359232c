"""Every Triton kernel, compiled ahead of time for devices that need not be there: its configuration must fit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx import Mask
from tests import compiled
from tests.attention.inner import (
    AttentionArrays,
    AttentionSpec,
    compile_ahead,
    problem_of,
    RowRanges,
    TARGETS,
)
from tests.attention.tritons import compiled as triton
from tests.attention.tritons import TileConfig, TritonConfig
from tests.compiled import DEVICES

KERNELS = {"forward_kernel", "key_gradient_kernel", "query_gradient_kernel"}


def test_limits_agree():
    limits = {name: device.shared_memory for name, device in DEVICES.items()}
    assert limits == {name: target.shared_limit for name, target in TARGETS.items()}


def request(head_dim: int, dtype: str, everything: bool) -> tuple[AttentionArrays, AttentionSpec]:
    """The shapes of a call, with every flag off or on."""
    batch, t, s, heads, kv_heads = 2, 1000, 1000, 4, 2

    def shape(*size: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    arrays = AttentionArrays(shape(batch, t, heads, head_dim), *[shape(batch, s, kv_heads, head_dim)] * 2)
    spec = AttentionSpec(scale=head_dim**-0.5)
    if everything:
        spec = dataclasses.replace(spec, logits_soft_cap=30.0, dropout_rate=0.1)
        arrays = arrays._replace(
            bias=shape(batch, heads, t, s),
            alibi_slopes=shape(1, heads, dtype="float32"),
            sinks=shape(1, heads, dtype="float32"),
            mask=shape(batch, 1, t, s, dtype="bool"),
            q_segments=shape(batch, t, dtype="int32"),
            kv_segments=shape(batch, s, dtype="int32"),
            rows=RowRanges(*[shape(batch, t, dtype="int32")] * 3),
            seeds=shape(batch, heads, 2, dtype="uint32"),
        )
    return arrays, spec


def launches_of(arrays: AttentionArrays, spec: AttentionSpec, config: TritonConfig) -> dict[str, Any]:
    """What forward and backward would launch; nothing is run."""

    def both(arrays: AttentionArrays) -> Any:
        out, lse = triton.forward(arrays, spec, config)
        return triton.backward(arrays, spec, config, out, lse, out, lse)

    found = compiled.launches_of(both, arrays)
    return {name.removeprefix("hopper_"): launch for name, launch in found.items()}


def check(
    target: str, arrays: AttentionArrays, spec: AttentionSpec, most_spills: dict[str, int] | None = None
) -> None:
    problem = problem_of("flash_attention", arrays, spec)
    assert triton.unsupported(problem, DEVICES[target]) is None
    config = triton.default_config(problem, DEVICES[target])
    launches = launches_of(arrays, spec, config)
    assert set(launches) == KERNELS | ({"bias_gradient_kernel"} if arrays.bias is not None else set())
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits, (name, report, config)
        if most_spills is not None:
            assert report.spills <= most_spills.get(name.removesuffix("_kernel"), 0), (name, report, config)


def flagged(flags: str, head_dim: int, dtype: str) -> tuple[AttentionArrays, AttentionSpec]:
    """All flags off or on, or what neither has: a static window, and lists of tiles, in the second of which some queries have no keys."""
    arrays, spec = request(head_dim, dtype, flags == "on")
    if flags == "window":
        spec = dataclasses.replace(spec, left=255, right=0, logits_soft_cap=30.0)
    if flags in MASKS:
        spec = dataclasses.replace(spec, pattern=MASKS[flags].lower(1000, 1000).pattern)
    return arrays, spec


MASKS = {
    "lists": Mask.sliding_window(99, 99) | Mask.strided(400),
    "gaps": Mask.strided(2000) & ~Mask.chunked(2),
}
LISTED = {"forward": 104, "key_gradient": 384, "query_gradient": 96}
# Every two of the extreme widths, of the dtypes, and of no flags and all. The bytes a thread (of AMD registers) that kernels may spill, where any:
# of the tiles that were fastest on an H200, and where smaller ones spill too. None: not counted.
GRID: dict[tuple[str, int, str, str], dict[str, int] | None] = {
    ("sm_80", 64, "bfloat16", "on"): {"forward": 72, "key_gradient": 24, "query_gradient": 184},
    ("sm_80", 256, "bfloat16", "off"): {"forward": 8},
    ("sm_90", 64, "bfloat16", "on"): {"query_gradient": 64},
    ("sm_90", 256, "bfloat16", "off"): {"key_gradient": 48},
    ("sm_90", 64, "float32", "off"): {"key_gradient": 72, "query_gradient": 104},
    ("sm_100", 64, "bfloat16", "on"): {"query_gradient": 56},
    ("sm_100", 256, "bfloat16", "off"): {},
    ("gfx942", 64, "bfloat16", "on"): None,
    ("gfx942", 256, "bfloat16", "off"): None,
    **{(target, 64, "float32", "off"): None for target in ("sm_80", "sm_100", "gfx942")},
    **{(target, 256, "float32", "on"): None for target in ("sm_80", "sm_90", "gfx942")},
    ("sm_90", 128, "bfloat16", "window"): None,
    ("gfx942", 128, "bfloat16", "window"): None,
    # As wide as without lists, and no more spills than without.
    ("sm_90", 64, "bfloat16", "lists"): LISTED,
    ("gfx942", 128, "bfloat16", "lists"): LISTED,
    ("sm_90", 128, "bfloat16", "gaps"): LISTED,
}
QUICK = {("sm_80", 64, "bfloat16", "on"), ("sm_90", 64, "bfloat16", "lists")}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
        for case in GRID
    ],
)
def test_defaults_fit(case):
    target, head_dim, dtype, flags = case
    check(target, *flagged(flags, head_dim, dtype), GRID[case])


@pytest.mark.parametrize(("t", "s"), [(1, 1), pytest.param(1, 70, marks=pytest.mark.slow)])
def test_one_query_and_one_key(t, s):
    """A length of 1 is a constant to the compiler."""
    shape: Any = lambda length, dtype, *more: jax.ShapeDtypeStruct((2, length, *more), jnp.dtype(dtype))
    arrays = AttentionArrays(shape(t, "bfloat16", 4, 16), *[shape(s, "bfloat16", 2, 16)] * 2)
    arrays = arrays._replace(rows=RowRanges(*[shape(t, "int32")] * 3))
    check("sm_90", arrays, AttentionSpec(scale=0.25))


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_are_few_and_within_the_estimate(target, dtype):
    device = DEVICES[target]
    for head_dim, everything in ((16, False), (40, True), (64, False), (96, True), (160, True), (256, False)):
        problem = problem_of("flash_attention", *request(head_dim, dtype, everything))
        configs = triton.candidates(problem, device)
        assert configs[0] == triton.default_config(problem, device) and len(set(configs)) == len(configs)
        assert all(triton.config_unsupported(config, problem, device) is None for config in configs)
        if target == "gfx942":
            assert not any(config.fast_tanh for config in configs)
            assert {config.float32_dot for config in configs} == {"ieee"}
        for kernel in ("forward", "key_gradient", "query_gradient"):
            tiles = {getattr(config, kernel) for config in configs}
            least = 4 if target in ("sm_90", "sm_100") and not everything else 1
            assert least <= len(tiles) <= 12
    small = dataclasses.replace(device, shared_memory=2048)
    wide = dataclasses.replace(configs[0], forward=TileConfig(64, 64, 4, 2))
    reason = triton.config_unsupported(wide, problem, small)
    assert reason is not None and "forward" in reason and "the device has 2048" in reason
