"""The kernels compiled ahead of time, for devices that need not be there: the defaults must fit, with estimates from above."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.compiled import DEVICES
from tests.paged.cases import core, LARGEST, PagedArrays, PagedSpec
from tests.paged.triton_calls import compiled, FILLED, launches, PagedTile, tile_sizes

DIMS: dict[str, int] = {"N": 64, "H": 32, "K": 8, "D": 128, "p": 16, "M": 256, "Q": 1, "rope": 0}
LATENT: dict[str, Any] = {"K": 1, "D": 512, "rope": 64, "p": 64, "M": 64}
BYTES = {"pages": "int8", "scales": "token"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": {"N": 1, "M": 1, "p": 4096, "options": True, "dtype": "float32"},
    "wide heads": {"H": 16, "K": 2, "D": 256, "p": 24, "Q": 8, "dtype": "float16"},
    "latent, 16 heads": LATENT | {"H": 16},  # more partial results than are merged in one step
    "latent int8": LATENT | BYTES | {"H": 128},
    "int8": BYTES,
    "float8": {"pages": "float8_e5m2", "values": "bfloat16", "scales": "head"},
    "mixed": {"Q": 64},
    "gates": {"Q": 64, "gates": True},
    "mixed, every option": {"Q": 64, "D": 64, "options": True, "dtype": "float32"},
    # Not compiled ahead.
    "latent": LATENT | {"H": 128},
    "latent int8, 16 heads": LATENT | BYTES | {"H": 16},
}
# Both kernels without and with all options on every device, of the others each on two.
EVERYWHERE = ("plain", "every option", "mixed", "mixed, every option")
GRID = [(target, kind) for target in DEVICES for kind in EVERYWHERE]
GRID += [(target, kind) for target in ("sm_80", "sm_100") for kind in ("latent int8", "float8")]
GRID += [
    (target, kind)
    for target in ("sm_90", "gfx942")
    for kind in ("gates", "wide heads", "latent, 16 heads", "int8")
]
KERNELS = {"decode_kernel", "merge_kernel", "prefill_kernel"}


def request(kind: str, **dims: int) -> tuple[PagedArrays, PagedSpec]:
    given = {**DIMS, "dtype": "bfloat16", "scales": None, "options": False, **KINDS[kind], **dims}
    count, heads, kv_heads, dim, page, tables, queries, rope = (given[name] for name in DIMS)
    dtype, scales = given["dtype"], given["scales"]

    def shape(*size: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    first = given.get("pages", dtype)
    second = given.get("values", first)  # of values or rotary keys
    pages = lambda width, dtype: shape(1000, page, kv_heads, width, dtype=dtype)
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
    if given.get("gates"):
        own = shape(1, count * queries, heads, 2)
        arrays = arrays._replace(gates=shape(1000, page, heads, 2), own_gates=own)
    spec = PagedSpec(dim**-0.5, max_query_len=queries, latent=rope > 0, scales=scales)
    if not given["options"]:
        return arrays, spec
    more: Any = dict(kv_start=arrays.kv_len, qq_bias=shape(queries, queries))
    arrays = arrays._replace(sinks=shape(heads), slopes=shape(heads), **more)
    return arrays, PagedSpec(dim**-0.5, 30.0, 1023, queries)


def problem_of(kind: str, **dims: int) -> ejx.Problem:
    return core.problem_of("paged_attention", *request(kind, **dims))


@pytest.mark.few(3)
@pytest.mark.parametrize("target, kind", GRID)
def test_defaults_fit(target, kind):
    (arrays, spec), device, problem = request(kind), DEVICES[target], problem_of(kind)
    assert compiled.unsupported(problem, device) is None
    config = compiled.default_config(problem, device)
    assert compiled.config_unsupported(config, problem, device) is None
    found = launches(arrays, spec, config)
    assert ("merge_kernel" in found) == (config.split_k > 1)
    for name in found.keys() & KERNELS:
        report = ejx.launch.compile_ahead(found[name], target)
        assert report.fits, (name, report, config)
        if name == "decode_kernel" and config.decode != tile_sizes.SMALLEST:
            assert report.shared <= tile_sizes.shared_memory(problem, config.decode, device)
        if name == "prefill_kernel":
            assert report.spills <= (256 if arrays.q.dtype == "float32" else 96), report


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, kind", [("sm_90", "plain"), ("sm_100", "latent, 16 heads"), ("gfx942", "latent, 16 heads")]
)
def test_launches_that_merge_fit(target, kind):
    """On NVIDIA, where the tuner tries them, without more spills."""
    (arrays, spec), device, problem = request(kind), DEVICES[target], problem_of(kind)
    default = compiled.default_config(problem, device)
    config = dataclasses.replace(default, split_k=5, chunk_size=default.decode.block_k, together=True)
    report, apart = (
        ejx.launch.compile_ahead(launches(arrays, spec, of)["decode_kernel"], target)
        for of in (config, dataclasses.replace(config, together=False))
    )
    assert report.fits and report.shared <= tile_sizes.shared_memory(problem, config.decode, device)
    assert device.vendor == "amd" or report.spills <= apart.spills


@pytest.mark.parametrize("kind", ("plain", "latent", "int8", "mixed"))
def test_candidates_begin_with_the_heuristic_and_differ(kind):
    problem, device = problem_of(kind), DEVICES["sm_90"]
    configs = compiled.candidates(problem, device)
    assert configs[0] == compiled.default_config(problem, device)
    assert 6 <= len(set(configs)) == len(configs) <= 12
    assert len({config.split_k for config in configs}) > 1
    assert all(compiled.config_unsupported(config, problem, device) is None for config in configs)


@pytest.mark.parametrize(
    "kind, bound",
    [("latent int8", True), ("latent int8, 16 heads", False), ("latent", False), ("int8", False)],
)
def test_where_bytes_save_no_time(kind, bound):
    """`explain` says where 8-bit pages save no time."""
    problem, device = problem_of(kind), DEVICES["sm_90"]
    told = compiled.remark(compiled.default_config(problem, device), problem, device)
    assert ("8-bit latents" in told) == bound


@pytest.mark.parametrize("dims", [{"N": 0}, {"Q": 0}, {"N": 0, "M": 1}])
def test_a_configuration_for_nothing(dims):
    """As a mapped axis of size 0 asks for."""
    problem = problem_of("plain", **dims)
    for device in DEVICES.values():
        assert compiled.default_config(problem, device) in compiled.candidates(problem, device)


@pytest.mark.parametrize("kernel", ("decode", "prefill"))
def test_tiles_that_cannot_fit_are_told(kernel):
    problem, device = problem_of("mixed"), DEVICES["sm_90"]
    config = compiled.default_config(problem, device)
    large = dataclasses.replace(config, **{kernel: PagedTile(128, 256, 8, 4)})
    reason = compiled.config_unsupported(large, problem, device)
    assert reason is not None and reason.startswith(f"{kernel} with 128x256 tiles")


@pytest.mark.parametrize(
    "kind, dims, least, most",
    (
        ("plain", {}, 512, 2048),
        ("plain", {"N": 1, "M": 8192}, 256, 264),
        ("plain", {"N": 1, "M": 64}, 128, 128),
        ("plain", {"N": 8, "M": 1024}, 256, 264),
        ("plain", {"N": 512}, 4096, 4096),
        ("plain", {"N": 17}, 256, 792),
        ("latent", {}, 128, 128),
        ("latent", {"N": 40}, 113, 264),
        ("latent", {"N": 34}, 113, 396),
    ),
)
def test_the_device_is_filled(kind, dims, least, most):
    """Programs of the decode kernel on 132 multiprocessors, but for those that look for tokens of no sequence."""
    (arrays, spec), problem = request(kind, **dims), problem_of(kind, **dims)
    config = compiled.default_config(problem, DEVICES["sm_90"])
    (programs,) = launches(arrays, spec, config)["decode_kernel"].grid
    if config.split_k == 1:
        programs -= -(-arrays.q.shape[1] // FILLED.value)
    assert least <= programs <= most


def test_a_long_sequence_among_many_short_ones_is_spread_over_the_device():
    of = lambda **dims: compiled.default_config(problem_of("plain", **dims), DEVICES["sm_90"])
    many = of(N=256, M=8192)
    assert many.split_k >= 16 and many.chunk_size == 4096
    assert of(N=256).split_k == 1 and of(N=1, M=8192).split_k >= 32


def test_instructions_of_another_vendor_are_refused():
    problem, device = problem_of("int8"), DEVICES["gfx942"]
    config = compiled.default_config(problem, device)
    assert compiled.config_unsupported(config, problem, device) is None and not config.fast_bytes
    reason = compiled.config_unsupported(dataclasses.replace(config, fast_bytes=True), problem, device)
    assert reason == "fast_bytes uses NVIDIA's instructions"


def test_a_configuration_for_other_sequences():
    """What was measured for few long sequences keeps its tiles for others, not its splits."""
    device, (few, fewer) = DEVICES["sm_90"], (problem_of("plain", N=n) for n in (8, 4))
    measured = dataclasses.replace(compiled.default_config(few, device), decode=PagedTile(16, 32, 4, 4))
    fit = compiled.adapted(measured, fewer, device)
    assert fit.decode == measured.decode
    assert (fit.split_k, fit.chunk_size) == (8, 256) != (measured.split_k, measured.chunk_size)
