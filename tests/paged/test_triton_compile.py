"""The decode kernels compiled ahead of time, for devices that need not be there: the defaults must fit, with estimates from above."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.launch import compile_ahead, Launch
from ejkernel_eqx.paged.cache.quantise import LARGEST
from ejkernel_eqx.paged.core import problem_of
from ejkernel_eqx.paged.spec import PagedArrays, PagedSpec
from tests.compiled import DEVICES, launches_of

pytest.importorskip("triton")
from ejkernel_eqx.paged.triton import compiled as triton
from ejkernel_eqx.paged.triton import tile_sizes
from ejkernel_eqx.paged.triton.tile import FILLED

DIMS: dict[str, int] = {"N": 64, "H": 32, "K": 8, "D": 128, "p": 16, "M": 256, "Q": 1, "rope": 0}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one sequence, one page": {"N": 1, "M": 1, "p": 4096, "options": True},
    "one long sequence": {"N": 1, "M": 8192},  # more splits than are merged in one step
    "narrow heads": {"H": 16, "K": 16, "D": 64},
    "wide heads": {"H": 16, "K": 2, "D": 256, "p": 64},
    "odd heads": {"H": 14, "K": 2, "D": 80, "p": 24},
    "speculative": {"Q": 8, "options": True, "dtype": "float16"},
    "16 queries": {"Q": 16},
    "mixed": {"Q": 64},
    "latent": {"H": 128, "K": 1, "D": 512, "rope": 64, "p": 64, "M": 64},
    "latent, 16 heads": {"H": 16, "K": 1, "D": 512, "rope": 64, "p": 64, "M": 64},
    "int8": {"pages": "int8", "scales": "token"},
    "int8, scales of heads": {"pages": "int8", "scales": "head"},
    "int8, 8 queries": {"pages": "int8", "scales": "token", "Q": 8},
    "latent int8": {"H": 128, "K": 1, "D": 512, "rope": 64, "p": 64, "pages": "int8", "scales": "token"},
    "latent int8, 16 heads": {
        "H": 16,
        "K": 1,
        "D": 512,
        "rope": 64,
        "p": 64,
        "pages": "int8",
        "scales": "token",
    },
    "latent float8": {
        "H": 128,
        "K": 1,
        "D": 512,
        "rope": 64,
        "p": 64,
        "pages": "float8_e4m3fn",
        "scales": "token",
    },
    "float8": {"pages": "float8_e4m3fn", "scales": "token"},
    "float8 with infinities": {"pages": "float8_e5m2", "scales": "token"},
    "bfloat16 keys, int8 values": {"values": "int8", "scales": "token"},
    "latent int8, bfloat16 rope": {
        "H": 128,
        "K": 1,
        "D": 512,
        "rope": 64,
        "p": 64,
        "pages": "int8",
        "values": "bfloat16",
        "scales": "token",
    },
    "float32": {"dtype": "float32"},
    "float32 queries": {"dtype": "float32", "pages": "bfloat16", "Q": 8},
}
QUICK = {
    ("gfx942", "latent, 16 heads"),  # more partial results than are merged in one step
    ("sm_80", "float8 with infinities"),
    ("sm_80", "speculative"),
    ("sm_90", "float8"),
    ("sm_90", "grouped"),
    ("sm_90", "latent"),
    ("sm_90", "one sequence, one page"),
    ("sm_90", "one long sequence"),
    ("sm_100", "latent, 16 heads"),
    ("gfx942", "int8, scales of heads"),
}


def request(kind: str, **dims: int) -> tuple[PagedArrays, PagedSpec]:
    given = {**DIMS, "dtype": "bfloat16", "scales": None, "options": False, **KINDS[kind], **dims}
    count, heads, kv_heads, dim, page, tables, queries, rope = (given[name] for name in DIMS)
    dtype, scales = given["dtype"], given["scales"]

    def shape(*size: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    first = given.get("pages", dtype)
    second = given.get("values", first)  # of values or rotary keys

    def pages(width: int, dtype: str) -> Any:
        return shape(1000, page, kv_heads, width, dtype=dtype)

    dtypes = {"k_scale": first, "rope_scale" if rope else "v_scale": second}
    names = [name for name, dtype in dtypes.items() if dtype in LARGEST]
    arrays = PagedArrays(
        q=shape(1, count * queries, heads, dim + rope, dtype=dtype),
        k=pages(dim, first),
        v=None if rope else pages(dim, second),
        page_table=shape(1, count, tables, dtype="int32"),
        **{name: shape(1, count, dtype="int32") for name in ("q_start", "q_len", "kv_len")},
        **({"rope": pages(rope, second)} if rope else {}),
        **{name: shape(*((1000, page) if scales == "token" else ()), kv_heads) for name in names},
    )
    spec = PagedSpec(dim**-0.5, max_query_len=queries, latent=rope > 0, scales=scales)
    if not given["options"]:
        return arrays, spec
    arrays = arrays._replace(
        kv_start=arrays.kv_len, sinks=shape(heads), slopes=shape(heads), qq_bias=shape(queries, queries)
    )
    return arrays, PagedSpec(dim**-0.5, 30.0, 1023, queries)


def launches(arrays: PagedArrays, spec: PagedSpec, config: Any) -> dict[str, Launch]:
    return launches_of(lambda arrays, execute: triton.forward(arrays, spec, config, execute=execute), arrays)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "target, kind",
    [
        pytest.param(target, kind, marks=() if (target, kind) in QUICK else pytest.mark.slow)
        for target in DEVICES
        for kind in KINDS
        if (target, kind) not in (("sm_80", "float8"), ("sm_80", "latent float8"))
    ],
)
def test_defaults_fit(target, kind):
    (arrays, spec), device = request(kind), DEVICES[target]
    problem = problem_of("paged_attention", arrays, spec)
    assert triton.unsupported(problem, device) is None
    config = triton.default_config(problem, device)
    assert triton.config_unsupported(config, problem, device) is None
    found = launches(arrays, spec, config)
    assert ("merge_kernel" in found) == (config.split_k > 1)
    for name in found.keys() & {"decode_kernel", "merge_kernel"}:
        report = compile_ahead(found[name], target)
        assert report.fits, (
            f"{name} needs {report.shared} bytes of shared memory, {target} has {report.shared_limit}: {config}"
        )
        if name == "decode_kernel" and config.decode != tile_sizes.SMALLEST:
            assert report.shared <= tile_sizes.shared_memory(problem, config.decode, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, kind",
    [
        *itertools.product(("sm_90", "sm_100"), ("grouped", "speculative", "latent, 16 heads", "int8")),
        ("sm_80", "grouped"),
        ("gfx942", "latent, 16 heads"),
    ],
)
def test_launches_that_merge_fit(target, kind):
    """On NVIDIA, where the tuner tries them, without more spills."""
    (arrays, spec), device = request(kind), DEVICES[target]
    problem = problem_of("paged_attention", arrays, spec)
    default = triton.default_config(problem, device)
    config = dataclasses.replace(default, split_k=5, chunk_size=default.decode.block_k, together=True)
    launch = launches(arrays, spec, config)["decode_kernel"]
    report = compile_ahead(launch, target)
    assert report.fits and report.shared <= tile_sizes.shared_memory(problem, config.decode, device)
    apart = launches(arrays, spec, dataclasses.replace(config, together=False))["decode_kernel"]
    assert device.vendor == "amd" or report.spills <= compile_ahead(apart, target).spills


@pytest.mark.parametrize("kind", ("grouped", "latent", "int8", "mixed"))
def test_candidates_begin_with_the_heuristic_and_differ(kind):
    problem = problem_of("paged_attention", *request(kind))
    configs = triton.candidates(problem, DEVICES["sm_90"])
    assert configs[0] == triton.default_config(problem, DEVICES["sm_90"])
    assert 6 <= len(set(configs)) == len(configs) <= 12
    assert len({config.split_k for config in configs}) > 1
    for config in configs:
        assert triton.config_unsupported(config, problem, DEVICES["sm_90"]) is None


@pytest.mark.parametrize(
    "kind, heads, bound",
    [("latent int8", 128, True), ("latent int8", 16, False), ("latent", 128, False), ("int8", 32, False)],
)
def test_where_bytes_save_no_time(kind, heads, bound):
    """`explain` says where 8-bit pages save no time."""
    problem = problem_of("paged_attention", *request(kind, H=heads))
    device = DEVICES["sm_90"]
    assert (
        "8-bit latents" in triton.remark(triton.default_config(problem, device), problem, device)
    ) == bound


@pytest.mark.parametrize("dims", [{"N": 0}, {"Q": 0}, {"N": 0, "M": 1}])
def test_a_configuration_for_nothing(dims):
    """As a mapped axis of size 0 asks for."""
    for device in DEVICES.values():
        arrays, spec = request("grouped", **dims)
        problem = problem_of("paged_attention", arrays, spec)
        assert triton.default_config(problem, device) in triton.candidates(problem, device)


def test_tiles_that_cannot_fit_are_told():
    problem = problem_of("paged_attention", *request("mixed"))
    config = triton.default_config(problem, DEVICES["sm_90"])
    for kernel in ("decode", "prefill"):
        large = dataclasses.replace(config, **{kernel: triton.PagedTile(128, 256, 8, 4)})
        reason = triton.config_unsupported(large, problem, DEVICES["sm_90"])
        assert reason is not None and reason.startswith(f"{kernel} with 128x256 tiles")


@pytest.mark.parametrize(
    "kind, dims, least, most",
    (
        ("grouped", {}, 512, 2048),
        ("grouped", {"N": 1, "M": 8192}, 256, 264),
        ("grouped", {"N": 1, "M": 64}, 128, 128),
        ("grouped", {"N": 8, "M": 1024}, 256, 264),
        ("grouped", {"N": 512}, 4096, 4096),
        ("grouped", {"N": 17}, 256, 792),
        ("grouped", {"N": 20}, 256, 792),
        ("latent", {}, 128, 128),
        ("latent", {"N": 40}, 113, 264),
        ("latent", {"N": 34}, 113, 396),
        ("latent", {"N": 1, "M": 2048}, 112, 264),
    ),
)
def test_the_device_is_filled(kind, dims, least, most):
    """Programs of the decode kernel on 132 multiprocessors, but for those that look for tokens of no sequence."""
    arrays, spec = request(kind, **dims)
    config = triton.default_config(problem_of("paged_attention", arrays, spec), DEVICES["sm_90"])
    (programs,) = launches(arrays, spec, config)["decode_kernel"].grid
    if config.split_k == 1:
        programs -= -(-arrays.q.shape[1] // FILLED.value)
    assert least <= programs <= most


def test_instructions_of_another_vendor_are_refused():
    arrays, spec = request("int8")
    problem, device = problem_of("paged_attention", arrays, spec), DEVICES["gfx942"]
    config = triton.default_config(problem, device)
    assert triton.config_unsupported(config, problem, device) is None and not config.fast_bytes
    reason = triton.config_unsupported(dataclasses.replace(config, fast_bytes=True), problem, device)
    assert reason == "fast_bytes uses NVIDIA's instructions"


def test_a_configuration_for_other_sequences():
    """What was measured for few long sequences keeps its tiles for others, not its splits."""
    device, problems = (
        DEVICES["sm_90"],
        [problem_of("paged_attention", *request("grouped", N=n)) for n in (8, 4)],
    )
    measured = dataclasses.replace(
        triton.default_config(problems[0], device), decode=triton.PagedTile(16, 32, 4, 4)
    )
    fit = triton.adapted(measured, problems[1], device)
    assert fit.decode == measured.decode
    assert (fit.split_k, fit.chunk_size) == (8, 256) != (measured.split_k, measured.chunk_size)
