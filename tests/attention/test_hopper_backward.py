"""Hopper's backward kernel without a Hopper: when it is chosen, its numbers by emulation, and that every tile of it compiles without products that
wait for one another."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import Case, make, poison
from tests.attention.hopper import (
    call,
    CAUSAL,
    check_compiled,
    configured,
    gradient_launches,
    HOPPER,
    needs_gluon,
    problem,
    triton,
)
from tests.attention.hopper_emulation import Device
from tests.attention.inner import problem_of
from tests.attention.kernels import assert_same, cotangents, run_reference
from tests.attention.tritons import backward_call, backward_tiles, tile_sizes
from tests.compiled import executed
from tests.tolerances import assert_close

TILE = triton.TileConfig(64, 128, 4, 2, 0, 1)
TILES = {
    192: TILE,
    64: triton.TileConfig(64, 128, 4, 3, 0, 1),
    128: TILE,
    256: triton.TileConfig(64, 64, 4, 1, 0, 1),
}


MANY: dict[str, Any] = dict(batch=8, queries=4096, keys=4096)


@needs_gluon
@pytest.mark.parametrize(
    "of, possible, chosen",
    [
        (problem(**CAUSAL, **MANY), True, True),
        (problem(80, "float16", with_=("sinks",), left=2047, **CAUSAL, **MANY), True, True),
        (problem(batch=99, queries=1024, keys=1024), True, True),
        (problem(batch=99, queries=512, keys=512), True, False),
        (problem(192, **MANY), True, True),
        (problem(192, values=128, **CAUSAL, **MANY), True, False),
        (problem(192, values=128, logits_soft_cap=30.0, **MANY), False, False),
        (problem(**CAUSAL), True, False),
        (problem(with_=("segments",), **MANY), True, False),
        (problem(logits_soft_cap=30.0, **MANY), True, False),
        (problem(left=255, **CAUSAL, **MANY), True, False),
        (problem(block_size=(128, 128), **MANY), False, False),
        (problem(256, logits_soft_cap=30.0, **MANY), False, False),
        (problem(with_=("bias",), **MANY), False, False),
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


@needs_gluon
def test_shared_memory():
    wide = configured(keys=dataclasses.replace(TILE, num_stages=3))
    assert "shared memory" in (triton.config_unsupported(wide, problem(), HOPPER) or "")


@pytest.mark.parametrize(
    "of, tile, word",
    [
        (call(with_=("bias",)), TILE, "bias"),
        (call(256, logits_soft_cap=20.0), TILE, "soft cap"),
        (call(64, logits_soft_cap=1e-12), TILE, "soft caps from 0.01 to 1e9"),
        (call(256), TILE, "64x128 at head dims of 256"),
        (call(), dataclasses.replace(TILE, num_stages=1), "1 stages"),
        (call(), dataclasses.replace(TILE, num_warps=8), "num_warps"),
    ],
)
def test_a_configuration_that_cannot_run(of: Any, tile, word):
    with pytest.raises(ValueError, match=f"hopper_programs=0 in key_gradient.*{word}"):
        gradient_launches(of[0], of[1], configured(keys=tile))


def test_no_keys_are_left_to_triton():
    pytest.importorskip("triton.experimental.gluon")
    found = gradient_launches(*call(keys=0), configured(keys=TILE))
    assert not any(launch.is_gluon for launch in found)


def test_order_of_tiles():
    """Of tiles of keys with gaps between those that see a tile of queries."""
    tiles = jnp.asarray([[[0, 0, 0, 2], [1, 1, 1, 1], [1, 1, 2, 3], [0, 0, 0, 1]]], jnp.int32)
    order, visited = backward_call.order_of(tiles, 4)
    np.testing.assert_array_equal(order[0, [0, 0, 2, 2, 3], [0, 1, 1, 2, 0]], [0, 0, 1, 0, 1])
    np.testing.assert_array_equal(visited, [[True, True, True, False]])


def odd(**more: Any) -> Case:
    sizes = dict[str, Any](B=1, T=200, S=200, H=2, K=1, D=128, V=128, dtype="bfloat16")
    return Case(**{**sizes, **more})


EMULATED = {
    "window 128": odd(T=330, S=400, left=140, right=20, offset=70),
    "window 64": odd(T=330, S=400, H=4, D=64, V=64, left=140, right=20, offset=70),
    "causal 64": odd(T=330, S=420, D=64, V=64, right=0, offset=90),
    "soft cap 128": odd(right=0, soft_cap=3.0, K=2),
    "soft cap 64": odd(D=64, V=64, B=2, rows="lengths", soft_cap=1.0),
    "queries without keys": odd(T=300, S=100, left=20, right=0, offset=-100),
    "scattered": odd(T=300, rows="scattered"),
    "segments and sinks": odd(B=2, segments=True, sinks="BH"),
    "window 192": odd(T=150, S=250, D=192, V=160, left=70, right=10, offset=90),
    "segments 256": odd(T=150, S=130, D=256, V=256, B=2, segments=True),
    "causal, keys of 192": odd(T=150, S=250, D=192, V=128, right=0, offset=100),
    "segments, keys of 144": odd(T=150, S=250, D=144, V=104, B=2, segments=True),
    "segments 64": odd(S=390, D=64, V=64, B=2, segments=True, right=0, offset=190),
}


def emulated(case: Case, arrays: Any, spec: Any, *results: Any, at_once: int = 1) -> Any:
    """The gradients, by the kernel's own code, with threads for its warps."""
    pytest.importorskip("ejkernel_eqx.attention.triton.hopper.backward_kernel", exc_type=ImportError)
    config = configured(keys=TILES[tile_sizes.padded_width(problem_of("flash_attention", arrays, spec))])
    return executed(triton.backward, Device(at_once=at_once).run)(arrays, spec, config, *results)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if i < 2 else pytest.mark.slow) for i, (name, case) in enumerate(EMULATED.items())],
)  # fmt: skip
def test_gradients(case):
    """NaN in what is hidden changes nothing."""
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    expected = run_reference(arrays, dout, dlse, spec)
    out, lse = jnp.asarray(expected.out, arrays.q.dtype), jnp.asarray(expected.lse, jnp.float32)
    actual = emulated(case, arrays, spec, out, lse, dout, dlse)
    for name in "qkv":
        assert_close(getattr(actual, name), getattr(expected.grads, name), "bfloat16", "gradient", name=name)
    if case.segments or case.rows:
        assert_same(actual, emulated(case, poison(case, arrays), spec, out, lse, dout, dlse))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_programs_at_once(dim):
    """However many programs share the tiles of keys, the results are the same bit for bit."""
    case = odd(T=260 if dim < 256 else 130, S=390 if dim < 256 else 200, D=dim, V=dim, right=0, offset=70)
    arrays, spec = make(case)
    given = arrays.q, jnp.zeros((case.B, case.H, case.T))
    first, second = (emulated(case, arrays, spec, *given, *given, at_once=count) for count in (1, 3))
    assert_same(first, second)


EVERYTHING: dict[str, Any] = dict(with_=("sinks", "segments", "rows"))
EVEN: dict[str, Any] = dict(queries=1024, keys=1024)
COMPILED: dict[str, Any] = {
    "causal 128": (call(**CAUSAL, **EVEN), 24),
    "causal 64": (call(64, **CAUSAL, **EVEN), 16),
    "everything 64": (call(64, **EVERYTHING), 200),
    "causal 256": (call(256, **CAUSAL, **EVEN), 0),
    "causal, keys of 192": (call(192, values=128, **CAUSAL, **EVEN), 192),
    "everything, keys of 192": (call(192, values=128, **EVERYTHING), 296),
    "everything 192": (call(192, **EVERYTHING), 8),
    "soft cap 128": (call(**CAUSAL, **EVEN, logits_soft_cap=30.0), 24),
    "one row": (call(batch=1, heads=1, kv_heads=1, keys=1), 24),
}


@needs_gluon
@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPILED)
def test_defaults_compile(name):
    """The few bytes that are spilled are addresses."""
    of, spills = COMPILED[name]
    of_call = problem_of("flash_attention", *of)
    tile = triton.TileConfig(*backward_tiles.tiles(of_call, HOPPER)[0])
    (launch,) = gradient_launches(of[0], of[1], configured(keys=tile))
    assert check_compiled(launch, spills).shared <= backward_tiles.shared_memory(tile, of_call)
