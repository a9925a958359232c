"""Hopper's kernels without a Hopper: when they are chosen, what they are given, and that every tile of theirs compiles without spills."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from ejkernel_eqx.dispatch import from_dict, to_dict
from ejkernel_eqx.launch import compile_ahead, executing, gluon_unavailable, own_call, run
from tests.compiled import DEVICES
from tests.matmul.cases import example_problem, make_arrays, spec_of
from tests.workloads import launches

pytest.importorskip("triton")
from ejkernel_eqx.matmul.triton import compiled as triton

HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")
MANY = dict(M=16384, K=4096, N=14336, E=8)
FINE = dict(M=32768, K=2048, N=1408, E=64)
KERNELS = ("forward", "lhs", "rhs")
SWIGLU = dict(gated="pair", activation="silu")


def problem(sizes=MANY, dtype="bfloat16", **flags):
    return example_problem("grouped_matmul", sizes, dtype, flags)


def in_hopper(config):
    return [kernel for kernel in KERNELS if getattr(config, kernel).hopper_programs]


@needs_gluon
@pytest.mark.parametrize(
    "of, expected",
    [
        (problem(), ["forward", "lhs", "rhs"]),
        (problem(FINE, "float16", transpose_rhs=True, **SWIGLU), ["forward", "lhs", "rhs"]),
        (problem(gated="halves", activation="gelu", bias=True), ["forward", "lhs", "rhs"]),
        (problem(gated="interleaved", activation="silu"), ["lhs", "rhs"]),
        (problem(gathered=True), ["lhs"]),
        (problem(dict(M=8 * 63, K=4096, N=14336, E=8)), []),
        (problem(dtype="float32"), []),
        (problem(stored="int8"), []),
        (problem(MANY | dict(K=4092)), []),
        (problem(MANY | dict(M=2**30 + 1)), []),
    ],
)
def test_where_it_is_chosen(of, expected):
    configs = triton.candidates(of, HOPPER)
    assert in_hopper(configs[0]) == expected
    assert all(getattr(configs[0], kernel).hopper_programs == 132 for kernel in expected)
    # Both kinds are candidates for each kernel, and tables hold both.
    for kernel in KERNELS:
        kinds = {getattr(config, kernel).hopper_programs > 0 for config in configs}
        assert kinds == ({False, True} if kernel in expected else {False})
    assert all(triton.config_unsupported(config, of, HOPPER) is None for config in configs)
    assert all(from_dict(to_dict(config), triton.TritonConfig) == config for config in configs)
    told = triton.remark(configs[0], of, HOPPER)
    assert all((kernel in told) == (kernel not in expected) for kernel in KERNELS)


def test_other_devices_and_tables_of_before():
    for name in ("sm_80", "sm_100", "gfx942"):
        reason = gluon_unavailable(DEVICES[name])
        assert reason is not None and "9.0" in reason
        config = triton.default_config(problem(), DEVICES[name])
        assert not in_hopper(config) and not triton.remark(config, problem(), DEVICES[name])
        moved = dataclasses.replace(config, forward=dataclasses.replace(config.forward, hopper_programs=132))
        assert "9.0" in (triton.config_unsupported(moved, problem(), DEVICES[name]) or "")
    known = to_dict(config)
    for kernel in KERNELS:
        del known[kernel]["hopper_programs"]
    assert from_dict(known, triton.TritonConfig) == config


def configured(**tiles):
    tile = triton.GroupedTile(128, 128, 64, 4, 6, 8, 132)
    config = triton.default_config(problem(), DEVICES["sm_80"])
    return dataclasses.replace(config, **({kernel: tile for kernel in KERNELS} | tiles))


@pytest.mark.parametrize(
    "of, config, word",
    [
        (problem(gathered=True), configured(), "gather"),
        (problem(gated="interleaved"), configured(), "interleaved"),
        (problem(MANY | dict(K=4092)), configured(), "4092"),
        (problem(), configured(forward=triton.GroupedTile(64, 128, 64, 4, 6, 8, 132)), "64x128x64"),
        (problem(), configured(forward=triton.GroupedTile(128, 128, 64, 8, 6, 8, 132)), "num_warps"),
        (problem(**SWIGLU), configured(forward=triton.GroupedTile(128, 256, 64, 4, 2, 8, 132)), "128x256x64"),
        (
            problem(),
            configured(forward=triton.GroupedTile(128, 256, 64, 4, 4, 8, 132, True)),
            "alternating tiles",
        ),
    ],
)
def test_a_configuration_that_cannot_run(of, config, word):
    with pytest.raises(ValueError, match=f"hopper_programs=0 in forward.*{word}"):
        launches("grouped_matmul", of, config)


@needs_gluon
def test_shared_memory_is_checked():
    config = configured(lhs=triton.GroupedTile(128, 256, 64, 4, 5, 8, 132))
    assert "shared memory" in (triton.config_unsupported(config, problem(), HOPPER) or "")


def test_it_is_not_interpreted():
    of, config = problem(dict(M=64, K=64, N=64, E=1)), configured()
    pytest.importorskip("triton.experimental.gluon")
    arrays = make_arrays(of, spec_of(of), 0)
    with pytest.raises(ValueError, match="interpreted"):
        with executing(functools.partial(run, interpret=True)):
            triton.forward(arrays, spec_of(of), config)


COMPILED = [
    (MANY, "bfloat16", {}),
    (FINE, "bfloat16", dict(transpose_rhs=True, **SWIGLU)),
    (MANY, "bfloat16", dict(transpose_rhs=True, bias=True, clipped=True, **SWIGLU)),
    (dict(B=3, M=900, K=264, N=328, E=5), "bfloat16", dict(activation="gelu_tanh", bias=True)),
]


@needs_gluon
@pytest.mark.parametrize(
    "i, every",
    [
        (0, False),
        (1, False),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, True), (2, True), (3, False))),
    ],
)
def test_tiles_compile(i, every):
    """Without spills to speak of: every candidate without options and with all."""
    sizes, dtype, flags = COMPILED[i]
    of = problem(sizes, dtype, **flags)
    configs, seen = triton.candidates(of, HOPPER), {}
    for config in configs if every else configs[:1]:
        for launch in launches("grouped_matmul", of, config):
            if launch.is_gluon:
                seen[launch.label, str(sorted(launch.constants.items()))] = launch
    assert len(seen) >= (10 if every else 3)
    for launch in seen.values():
        report = compile_ahead(launch, "sm_90")
        assert report.fits and report.spills <= 128 and report.registers <= 168, (launch.label, report)


@needs_gluon
def test_it_is_staged_in_a_mesh(monkeypatch):
    """The results vary over a mesh as the operands do. (What jaxlib reads takes one for GPUs.)"""
    monkeypatch.setattr(own_call, "begin", lambda launch, target: None)
    of = problem(dict(M=512, K=64, N=128, E=2))
    spec, config = spec_of(of), triton.default_config(of, HOPPER)
    arrays = make_arrays(of, spec, 0)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P(None, "d"), jax.P()

    def body(lhs, rhs, sizes):
        out = triton.forward(type(arrays)(lhs, sizes, rhs), spec, config)["out"]
        assert "V:d" in str(jax.typeof(out))
        return out

    split = jax.shard_map(body, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    text = str(jax.make_jaxpr(split)(arrays.lhs, arrays.rhs, arrays.sizes))
    assert "ejkernel_eqx_triton_call" in text


class _Pointer:
    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, more):
        return _Pointer(self.numbers, self.at + more)


def _as_python(function, **more):
    """A kernel's function of numbers alone."""
    gl = types.SimpleNamespace(
        minimum=min,
        maximum=max,
        load=lambda x: int(x.numbers.flat[x.at]),
        constexpr=int,
        where=lambda a, x, y: x if a else y,
    )
    plain = function.fn
    return types.FunctionType(plain.__code__, plain.__globals__ | {"gl": gl} | more, plain.__name__)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_every_row_once(seed):
    """The way from tile to tile, by the kernel's own arithmetic: all programs together come to each row and column once, as of its group."""
    kernels = pytest.importorskip("ejkernel_eqx.matmul.triton.hopper.products_kernel", exc_type=ImportError)
    tiles = _as_python(kernels._tiles)
    group_of, place = _as_python(kernels.group_of, _tiles=tiles), _as_python(kernels.place)
    rng = np.random.default_rng(seed)
    B, E, M = (int(rng.integers(1, most)) for most in (4, 7, 900))
    full, programs, swizzle = int(rng.choice([128, 256])), int(rng.choice([1, 3, 7])), int(rng.choice([4, 8]))
    columns = int(rng.integers(1, 6))
    sizes = [rng.multinomial(rng.integers(0, M + 1), rng.dirichlet(np.full(E, 0.5))) for _ in range(B)]
    every = np.concatenate([[*row, M - row.sum()] for row in sizes])  # with the rows past the last group
    count = sum(tiles(int(size), full, columns) for size in every)
    found = np.full((B * M, columns), -1)
    for program in range(programs):
        group, first, start, size = -1, 0, 0, 0
        for t in range(program, count, programs):
            group, first, start, size = group_of(
                _Pointer(np.stack(sizes)), t, group, first, start, size, B, M, E, full, columns
            )
            row, column = place(t - first, size, full, columns, swizzle)
            for at in (row * full, row * full + full // 2):
                mine = slice(start + at, max(start + at, start + min(size, at + full // 2)))
                assert 0 <= column < columns and (found[mine, column] == -1).all()
                found[mine, column] = group
    np.testing.assert_array_equal(found, np.repeat(np.arange(len(every)), every)[:, None].repeat(columns, 1))
