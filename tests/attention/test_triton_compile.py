"""Every Triton kernel, compiled ahead of time for devices that need not be there: its configuration must fit."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx import Mask
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec, RowRanges
from ejkernel_eqx.dispatch import Backend, DeviceFacts
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.launch import compile_ahead, Launch, TARGETS

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as triton

DEVICES = {
    "sm_80": DeviceFacts(Backend.GPU, "A100", "nvidia", "8.0", 108, shared_memory_limit("nvidia", "8.0")),
    "sm_90": DeviceFacts(Backend.GPU, "H100", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")),
    "sm_100": DeviceFacts(Backend.GPU, "B200", "nvidia", "10.0", 148, shared_memory_limit("nvidia", "10.0")),
    "gfx942": DeviceFacts(Backend.GPU, "MI300X", "amd", "9.4.2", 304, shared_memory_limit("amd", "gfx942")),
}


def test_limits_agree():
    assert {name: device.shared_memory for name, device in DEVICES.items()} == {
        n: t.shared_limit for n, t in TARGETS.items()
    }


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


def launches_of(
    arrays: AttentionArrays, spec: AttentionSpec, config: triton.TritonConfig
) -> dict[str, Launch]:
    """What forward and backward would launch; nothing is run."""
    found = {}

    def record(launch, inputs):
        found[launch.function.fn.__name__.removeprefix("hopper_")] = launch
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def both(arrays):
        out, lse = triton.forward(arrays, spec, config, execute=record)
        return triton.backward(arrays, spec, config, out, lse, out, lse, execute=record)

    jax.eval_shape(both, arrays)
    return found


CAUSAL = AttentionSpec(scale=0.1, right=0)
WINDOWED = AttentionSpec(scale=0.1, left=255, right=0, logits_soft_cap=30.0)


def check(
    target: str,
    arrays: AttentionArrays,
    spec: AttentionSpec,
    kernels: set[str],
    most_spills: dict[str, int] | None = None,
) -> None:
    device = DEVICES[target]
    problem = problem_of("flash_attention", arrays, spec)
    assert triton.unsupported(problem, device) is None
    config = triton.default_config(problem, device)
    launches = launches_of(arrays, spec, config)
    assert set(launches) == kernels
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits, (
            f"{name} needs {report.shared} bytes of shared memory, {target} has {report.shared_limit}: {config}"
        )
        if most_spills is not None:
            assert report.spills <= most_spills.get(name.removesuffix("_kernel"), 0), (name, report, config)


LISTED = {
    "lists": (
        Mask.sliding_window(99, 99) | Mask.strided(400),
        {("sm_80", 128), ("sm_90", 64), ("sm_90", 128), ("sm_90", 256), ("gfx942", 128)},
    ),
    "lists, some queries without keys": (
        Mask.strided(2000) & ~Mask.chunked(2),
        {("sm_90", 128), ("sm_100", 64)},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "target", "head_dim"),
    [
        pytest.param(name, *where, marks=() if where == ("sm_90", 128) else pytest.mark.slow)
        for name, (_, places) in LISTED.items()
        for where in sorted(places)
    ],
)
def test_lists_fit(name, target, head_dim):
    """As wide as without lists, and no more spills than without."""
    arrays, spec = request(head_dim, "bfloat16", False)
    pattern = LISTED[name][0].lower(1000, 1000).pattern
    spec = dataclasses.replace(spec, pattern=pattern)
    spills = {"forward": 104, "key_gradient": 384, "query_gradient": 96}
    check(target, arrays, spec, {"forward_kernel", "key_gradient_kernel", "query_gradient_kernel"}, spills)


PLAIN = {"forward_kernel", "key_gradient_kernel", "query_gradient_kernel"}


@pytest.mark.parametrize(("t", "s"), [(1, 1), pytest.param(1, 70, marks=pytest.mark.slow)])
def test_one_query_and_one_key(t, s):
    """A length of 1 is a constant to the compiler."""
    shape: Any = lambda length, dtype, *more: jax.ShapeDtypeStruct((2, length, *more), jnp.dtype(dtype))
    arrays = AttentionArrays(shape(t, "bfloat16", 4, 16), *[shape(s, "bfloat16", 2, 16)] * 2)
    arrays = arrays._replace(rows=RowRanges(*[shape(t, "int32")] * 3))
    check("sm_90", arrays, AttentionSpec(scale=0.25), PLAIN)


# The whole grid is long; what runs by default has every head dim, dtype, flag and target in it, and no pair of them twice.
QUICK = {
    ("sm_80", 64, "bfloat16", True),
    ("sm_80", 256, "bfloat16", False),
    ("sm_90", 128, "bfloat16", True),
    ("sm_90", 256, "bfloat16", True),
    ("sm_90", 64, "float32", False),
    ("sm_100", 128, "bfloat16", False),
    ("gfx942", 128, "bfloat16", True),
    ("gfx942", 64, "float32", True),
}
# Bytes a thread (of AMD registers), where any: of the tiles that were fastest on an H200, and where smaller ones spill too.
SPILLS = {
    ("sm_80", 64, "bfloat16", False): {"key_gradient": 16, "query_gradient": 8},
    ("sm_80", 64, "bfloat16", True): {"forward": 72, "key_gradient": 24, "query_gradient": 184},
    ("sm_80", 128, "bfloat16", True): {"forward": 16, "key_gradient": 104, "query_gradient": 16},
    ("sm_80", 256, "bfloat16", False): {"forward": 8},
    ("sm_80", 256, "bfloat16", True): {"forward": 72, "key_gradient": 24, "query_gradient": 8},
    ("sm_90", 64, "bfloat16", False): {"key_gradient": 56, "query_gradient": 24},
    ("sm_90", 64, "bfloat16", True): {"query_gradient": 64},
    # The forward where jax-triton limits registers; else it has none.
    ("sm_90", 128, "bfloat16", False): {"forward": 88, "key_gradient": 48},
    ("sm_90", 128, "bfloat16", True): {"key_gradient": 160, "query_gradient": 112},
    ("sm_90", 256, "bfloat16", False): {"key_gradient": 48},
    ("sm_90", 256, "bfloat16", True): {"forward": 8, "key_gradient": 144, "query_gradient": 48},
    ("sm_90", 64, "float32", False): {"key_gradient": 72, "query_gradient": 104},
    ("sm_90", 64, "float32", True): {
        "forward": 48,
        "key_gradient": 240,
        "query_gradient": 520,
        "bias_gradient": 112,
    },
    ("sm_90", 128, "float32", False): {"forward": 144, "key_gradient": 840, "query_gradient": 400},
    ("sm_90", 128, "float32", True): {
        "forward": 424,
        "key_gradient": 1024,
        "query_gradient": 1432,
        "bias_gradient": 1768,
    },
    ("sm_100", 64, "bfloat16", True): {"query_gradient": 56},
    ("sm_100", 128, "bfloat16", True): {"key_gradient": 136},
    ("sm_100", 256, "bfloat16", True): {"forward": 32, "key_gradient": 56, "query_gradient": 96},
    ("gfx942", 64, "float32", True): {},
    ("gfx942", 128, "bfloat16", True): {"forward": 53, "key_gradient": 72, "query_gradient": 53},
}
GRID = [
    (target, d, dtype, flags)
    for target in DEVICES
    for d in (64, 128, 256)
    for dtype in ("bfloat16", "float32")
    for flags in (False, True)
    # In float32, where all with flags take long to compile: one of the two for a target, both where spills are counted.
    if dtype == "bfloat16" or target == "sm_90" or flags == (target != "sm_100")
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "target, head_dim, dtype, everything",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID],
)
def test_defaults_fit(target, head_dim, dtype, everything):
    arrays, spec = request(head_dim, dtype, everything)
    row = (target, head_dim, dtype, everything)
    otherwise = None if target == "gfx942" or dtype == "float32" else {}
    kernels = PLAIN | {"bias_gradient_kernel"} if everything else PLAIN
    check(target, arrays, spec, kernels, SPILLS.get(row, otherwise))


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("spec", [CAUSAL, WINDOWED], ids=["causal", "windowed"])
def test_static_windows_fit(target, spec):
    arrays, _ = request(128, "bfloat16", False)
    check(target, arrays, spec, PLAIN)


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_some_configuration_is_left_for_every_request(target, head_dim, dtype):
    arrays, spec = request(head_dim, dtype, True)
    problem = problem_of("flash_attention", arrays, spec)
    configs = triton.candidates(problem, DEVICES[target])
    assert configs[0] == triton.default_config(problem, DEVICES[target]) and len(set(configs)) == len(configs)
    if target == "gfx942":
        assert not any(config.fast_tanh for config in configs) and {
            config.float32_dot for config in configs
        } == {"ieee"}


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", DEVICES)
def test_candidates_are_few_and_within_the_estimate(target, head_dim, dtype):
    arrays, spec = request(head_dim, dtype, False)
    problem, device = problem_of("flash_attention", arrays, spec), DEVICES[target]
    configs = triton.candidates(problem, device)
    for kernel in ("forward", "key_gradient", "query_gradient"):
        tiles = {getattr(config, kernel) for config in configs}
        assert (4 if target in ("sm_90", "sm_100") else 1) <= len(tiles) <= 12
    assert all(triton.config_unsupported(config, problem, device) is None for config in configs)
    small = dataclasses.replace(device, shared_memory=2048)
    wide = dataclasses.replace(configs[0], forward=triton.TileConfig(64, 64, 4, 2))
    reason = triton.config_unsupported(wide, problem, small)
    assert reason is not None and "forward" in reason and "the device has 2048" in reason


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_candidate_fits(head_dim):
    arrays, _ = request(head_dim, "bfloat16", False)
    spec, device = dataclasses.replace(CAUSAL, scale=head_dim**-0.5), DEVICES["sm_90"]
    compiled = set()
    for config in triton.candidates(problem_of("flash_attention", arrays, spec), device):
        for name, launch in launches_of(arrays, spec, config).items():
            tile = getattr(config, name.removesuffix("_kernel"))
            if (name, tile) not in compiled:
                compiled.add((name, tile))
                assert compile_ahead(launch, "sm_90").fits, (name, tile)
    assert len(compiled) > 30


def test_the_four_kernels_are_told_apart():
    arrays, spec = request(64, "bfloat16", True)
    tile = triton.TileConfig(64, 32, 4, 2)
    launches = launches_of(arrays, spec, triton.TritonConfig(tile, tile, tile))
    assert {name: math.prod(launch.grid) for name, launch in launches.items()} == {
        "forward_kernel": 16 * 8,  # query tiles, batch x heads
        "key_gradient_kernel": 32 * 4,  # key tiles, batch x key heads
        "query_gradient_kernel": 16 * 8,
        "bias_gradient_kernel": 16 * 32 * 8,
    }
    assert all(launch.label.startswith("ejkernel_eqx.attention.") for launch in launches.values())
