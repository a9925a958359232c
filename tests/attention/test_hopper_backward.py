"""Hopper's backward kernel without a Hopper: when it is chosen, its numbers by emulation, and that every tile of it compiles without products that
wait for one another."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable
from ejkernel_eqx.launch.sizes import padded
from tests.attention import hopper_emulation
from tests.attention.cases import Case, make, poison
from tests.attention.test_hopper import _waits, call, CAUSAL, problem, TRITON
from tests.attention.test_xla import cotangents, run_reference
from tests.compiled import DEVICES
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import backward_call, backward_tiles

HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")
TILE = triton.TileConfig(64, 128, 4, 2, 0, 1)
TILES = {64: triton.TileConfig(64, 128, 4, 3, 0, 1), 128: TILE, 256: triton.TileConfig(64, 64, 4, 1, 0, 1)}


def configured(tile: Any = TILE) -> Any:
    return triton.TritonConfig(TRITON, tile, TRITON)


def launches(arrays: Any, spec: Any, config: Any) -> list[Any]:
    """What the backward would launch; nothing is run."""
    found = []

    def record(launch, inputs):
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def backward(arrays: Any) -> Any:
        out = jnp.zeros((*arrays.q.shape[:3], arrays.v.shape[-1]), arrays.q.dtype)
        lse = jnp.zeros(out.shape[:3]).swapaxes(1, 2)
        return triton.backward(arrays, spec, config, out, lse, out, lse, execute=record)

    jax.eval_shape(backward, arrays)
    return found


MANY: dict[str, Any] = dict(batch=8, queries=4096, keys=4096)


@needs_gluon
@pytest.mark.parametrize(
    "of, possible, chosen",
    [
        (problem(**CAUSAL, **MANY), True, True),
        (problem(80, "float16", with_=("sinks",), left=2047, **CAUSAL, **MANY), True, True),
        (problem(64, **CAUSAL, **MANY), True, True),
        (problem(batch=99, queries=1024, keys=1024), True, True),
        (problem(batch=99, queries=512, keys=512), True, False),
        (problem(192, **MANY), True, True),
        (problem(**CAUSAL), True, False),
        (problem(with_=("segments",), **MANY), True, False),
        (problem(80, with_=("rows",), **MANY), True, False),
        (problem(logits_soft_cap=30.0, **MANY), True, False),
        (problem(left=255, **CAUSAL, **MANY), True, False),
        (problem(block_size=(128, 128), **MANY), False, False),
        (problem(256, logits_soft_cap=30.0, **MANY), False, False),
        (problem(with_=("bias",), **MANY), False, False),
        (problem(with_=("mask",), **MANY), False, False),
        (problem(with_=("seeds",), dropout_rate=0.1, **MANY), False, False),
        (problem(dtype="float32", **MANY), False, False),
        (problem(queries=127), False, False),
    ],
)
def test_where_it_is_chosen(of, possible, chosen):
    configs = triton.candidates(of, HOPPER)
    assert configs[0] == triton.default_config(of, HOPPER)
    assert (configs[0].key_gradient.hopper_programs > 0) == chosen
    # Both kinds are candidates.
    kinds = {config.key_gradient.hopper_programs > 0 for config in configs}
    assert kinds == ({False, True} if possible else {False})
    assert all(triton.config_unsupported(config, of, HOPPER) is None for config in configs)
    assert bool(backward_tiles.not_chosen(of, HOPPER)) != chosen
    assert ("Triton's kernels" in triton.remark(configs[0], of, HOPPER)) != chosen


def test_other_devices():
    for name in ("sm_80", "sm_100", "gfx942"):
        assert not triton.default_config(problem(), DEVICES[name]).key_gradient.hopper_programs
        small = triton.TileConfig(16, 16, 4, 1)
        config = triton.TritonConfig(small, TILE, small)
        assert "9.0" in (triton.config_unsupported(config, problem(), DEVICES[name]) or "")


@needs_gluon
def test_shared_memory():
    wide = configured(dataclasses.replace(TILE, num_stages=3))
    assert "shared memory" in (triton.config_unsupported(wide, problem(), HOPPER) or "")


@pytest.mark.parametrize(
    "of, tile, word",
    [
        (call(with_=("bias",)), TILE, "bias"),
        (call(256, logits_soft_cap=20.0), TILE, "soft cap"),
        (call(64, logits_soft_cap=1e-12), TILE, "soft caps from 0.01 to 1e9"),
        (call(256), TILE, "64x128 at head dims of 256"),
        (call(64), dataclasses.replace(TILE, block_q=128), "128x128 at head dims of 64"),
        (call(), dataclasses.replace(TILE, block_q=128), "128x128"),
        (call(), dataclasses.replace(TILE, num_stages=1), "1 stages"),
        (call(), dataclasses.replace(TILE, num_warps=8), "num_warps"),
    ],
)
def test_a_configuration_that_cannot_run(of: Any, tile, word):
    with pytest.raises(ValueError, match=f"hopper_programs=0 in key_gradient.*{word}"):
        launches(of[0], of[1], configured(tile))


def test_no_keys_are_left_to_triton():
    pytest.importorskip("triton.experimental.gluon")
    assert not any(launch.is_gluon for launch in launches(*call(keys=0), configured()))


def test_turns():
    """Of tiles of keys with gaps between those that see a tile of queries."""
    tiles = jnp.asarray([[[0, 0, 0, 2], [1, 1, 1, 1], [1, 1, 2, 3], [0, 0, 0, 1]]], jnp.int32)
    order, visited = backward_call.turns_of(tiles, 4)
    np.testing.assert_array_equal(order[0, [0, 0, 2, 2, 3], [0, 1, 1, 2, 0]], [0, 0, 1, 0, 1])
    np.testing.assert_array_equal(visited, [[True, True, True, False]])


def odd(**more: Any) -> Case:
    return Case(**{**dict[str, Any](B=1, T=200, S=200, H=2, K=1, D=128, V=128), **more})


def modules_of(case: Case) -> tuple[Any, Any]:
    """That of the kernel, and of what all of them have in common."""
    name = {64: "narrow_backward_kernel", 128: "backward_kernel", 256: "wide_backward_kernel"}[
        padded(case.D, 64)
    ]
    folder = "ejkernel_eqx.attention.triton.hopper"
    kernels = pytest.importorskip(f"{folder}.{name}", exc_type=ImportError)
    return kernels, importlib.import_module(f"{folder}.backward_parts")


EMULATED = {
    "causal 128": odd(right=0),
    "causal 64": odd(T=330, S=420, D=64, V=64, right=0, offset=90),
    "full 64": odd(T=140, S=300, D=64, V=64, K=2),
    "window 128": odd(T=330, S=400, left=140, right=20, offset=70),
    "window 64": odd(T=300, S=300, D=64, V=64, left=70, right=0),
    "soft cap 128": odd(right=0, soft_cap=3.0),
    "soft cap 64": odd(D=64, V=64, B=2, rows="lengths", soft_cap=1.0),
    "queries without keys": odd(T=300, S=100, left=20, right=0, offset=-100),
    "lengths 80": odd(B=2, S=300, D=80, V=72, rows="lengths"),
    "packed": odd(rows="packed"),
    "scattered": odd(T=300, rows="scattered"),
    "segments and sinks": odd(B=2, segments=True, sinks="BH"),
    "causal 256": odd(T=150, S=150, D=256, V=256, right=0),
    "window 192": odd(T=150, S=250, D=192, V=160, left=70, right=10, offset=90),
    "segments 256": odd(T=150, S=130, D=256, V=256, B=2, segments=True),
    "window and soft cap 64": odd(T=200, S=300, D=64, V=64, left=90, right=20, soft_cap=20.0),
    "scattered 40": odd(T=130, S=300, D=40, V=64, rows="scattered"),
    "keys without queries 64": odd(T=100, S=420, D=64, V=64, right=0),
    "segments 64": odd(S=390, D=64, V=64, B=2, segments=True, right=0, offset=190),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if i < 2 else pytest.mark.slow) for i, (name, case) in enumerate(EMULATED.items())],
)  # fmt: skip
def test_gradients(case):
    """The kernel's own code, with threads for its warps; NaN in what is hidden changes nothing."""
    kernels, parts = modules_of(case)
    case = dataclasses.replace(case, dtype="bfloat16")
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    expected = run_reference(arrays, dout, dlse, spec)
    results = jnp.asarray(expected.out, arrays.q.dtype), jnp.asarray(expected.lse, jnp.float32)
    config = configured(TILES[padded(case.D, 64)])

    def emulated(arrays: Any) -> Any:
        run = hopper_emulation.Device(kernels, parts).run
        return triton.backward(arrays, spec, config, *results, dout, dlse, execute=run)

    actual = emulated(arrays)
    for name in "qkv":
        assert_close(getattr(actual, name), getattr(expected.grads, name), "bfloat16", "gradient", name=name)
    if case.segments or case.rows:
        for a, b in zip(
            jax.tree.leaves(actual), jax.tree.leaves(emulated(poison(case, arrays))), strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "case",
    [
        odd(T=260, S=390, K=2, right=0, offset=130),
        odd(T=260, S=390, D=64, V=64, right=0, offset=130),
        odd(T=130, S=200, D=256, V=256),
    ],
    ids=["128", "64", "256"],
)
@pytest.mark.slow
def test_programs_at_once(case):
    """However many programs share the tiles of keys, the results are the same bit for bit."""
    kernels, parts = modules_of(case)
    arrays, spec = make(dataclasses.replace(case, dtype="bfloat16"))
    lse = jnp.zeros((case.B, case.H, case.T))
    results = []
    for at_once in (1, 3):
        run = hopper_emulation.Device(kernels, parts, at_once).run
        config = configured(TILES[padded(case.D, 64)])
        results.append(triton.backward(arrays, spec, config, arrays.q, lse, arrays.q, lse, execute=run))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


EVERYTHING: dict[str, Any] = dict(with_=("sinks", "segments", "rows"))
EVEN: dict[str, Any] = dict(queries=1024, keys=1024)
COMPILED: dict[str, Any] = {
    "causal 128": (call(**CAUSAL, **EVEN), 112),
    "full 128": (call(**EVEN), 192),
    "window 96": (call(96, "float16", left=255, right=0), 112),
    "everything 128": (call(**EVERYTHING), 344),
    "causal 64": (call(64, **CAUSAL, **EVEN), 152),
    "full 64": (call(64, **EVEN), 112),
    "everything 64": (call(64, **EVERYTHING), 576),
    "causal 256": (call(256, **CAUSAL, **EVEN), 208),
    "everything 192": (call(192, **EVERYTHING), 240),
    "soft cap 128": (call(**CAUSAL, **EVEN, logits_soft_cap=30.0), 152),
    "soft cap 64": (call(64, **CAUSAL, **EVEN, logits_soft_cap=30.0), 136),
    "one row": (call(batch=1, heads=1, kv_heads=1, keys=1), 112),
}


@needs_gluon
@pytest.mark.parametrize(
    "of, spills",
    [
        pytest.param(*of, id=name, marks=() if i < 1 else pytest.mark.slow)
        for i, (name, of) in enumerate(COMPILED.items())
    ],
)
def test_defaults_compile(of: Any, spills: int) -> None:
    """Without products that wait for one another; the few bytes that are spilled are addresses."""
    sizes = backward_tiles.tiles(problem_of("flash_attention", *of), HOPPER)[0]
    (launch,) = launches(of[0], of[1], configured(triton.TileConfig(*sizes)))
    report = compile_ahead(launch, "sm_90")
    assert launch.is_gluon and report.fits and report.spills <= spills and report.registers <= 168, report
    assert report.shared <= backward_tiles.shared_memory(
        triton.TileConfig(*sizes), problem_of("flash_attention", *of)
    )
    assert not _waits(launch)
