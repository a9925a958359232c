"""Plain XLA: every option and every pair of options against the float64 formula, its memory, and its tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.cases import Case, COVERING, EMPTY, EVERYTHING, make, xla_tiles
from tests.attention.inner import Backend, device_facts, DeviceFacts, example_problem, xla
from tests.attention.kernels import assert_same, check_kernels, cotangents, Result

TILES = (xla.XlaConfig(xla.XlaTile(64, 48), xla.XlaTile(32, 64)), xla_tiles(32, 128), xla_tiles(512, 512))


def _run(arrays, dout, dlse, spec, config):
    out, lse = xla.forward(arrays, spec, config)
    return Result(out, lse, xla.backward(arrays, spec, config, out, lse, dout, dlse))


run = jax.jit(_run, static_argnums=(3, 4))


def check(case, config=TILES[0]):
    check_kernels(case, lambda *args: run(*args, config))


@pytest.mark.parametrize("n", range(len(COVERING)), ids=lambda n: COVERING[n].name)
def test_agrees_with_reference(n):
    check(COVERING[n], TILES[n % len(TILES)])


@pytest.mark.parametrize("case", [EMPTY[1], EMPTY[3]], ids=lambda case: case.name)
def test_empty(case):
    check(case)


@pytest.mark.slow
def test_float64(enable_x64):
    check(dataclasses.replace(EVERYTHING, dtype="float64"))


def test_repeats_bit_for_bit():
    arrays, spec = make(EVERYTHING)
    assert_same(*(run(arrays, *cotangents(EVERYTHING), spec, TILES[0]) for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [dict(right=0, sinks="1H", alibi="1H", dropout=0.1, bias="1H1S"), dict(rows="packed")]
)
def test_memory_is_linear_in_length(flags, optimised):
    temporary = []
    for length in (4096, 8192):
        case = Case(B=1, T=length, S=length, H=2, K=1, D=32, V=32, **flags)
        arrays, spec = make(case)
        dout, dlse = cotangents(case)
        config = xla.default_config(None, device_facts())
        analysis = optimised(run.lower(arrays, dout, dlse, spec, config)).memory_analysis()
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] <= 2.2 * temporary[0], temporary


def test_a_constant_mask_is_not_reduced_while_compiling():
    """XLA would fold the reduction of a mask that a jitted function closes over, with an evaluator that takes seconds for what runs in
    microseconds."""
    x, mask = jnp.ones((1, 16, 1, 8)), jnp.asarray(np.tri(16, dtype=bool))
    attend = lambda x: ejx.FlashAttention(platform="xla")(x, x, x, mask=mask)
    for function, count in ((attend, 1), (jax.grad(lambda x: attend(x).sum()), 2)):
        text = jax.jit(function).lower(x).as_text()
        assert text.count("optimization_barrier") == count


@pytest.mark.parametrize("block", [0, -1, True])
def test_config_is_validated(block):
    with pytest.raises(ValueError, match="block_k"):
        xla.XlaTile(64, block)


@pytest.mark.parametrize(
    ("dtype", "heads", "memory", "side"),
    [
        ("bfloat16", 16, 140, 1024),
        ("float32", 16, 140, 512),
        ("bfloat16", 16, 8, 512),
        ("bfloat16", 512, 8, 256),
    ],
)
def test_a_gpu_takes_the_largest_tile_that_its_memory_holds_often(dtype, heads, memory, side):
    device = DeviceFacts(Backend.GPU, "a GPU", memory=memory * 10**9)
    problem = example_problem("flash_attention", {"B": 4, "T": 4096, "H": heads, "D": 64}, dtype, {})
    tile = xla.XlaTile(side, side)
    assert (
        xla.default_config(problem, device) == xla.XlaConfig(tile, tile) == xla.candidates(problem, device)[0]
    )
    assert len(xla.candidates(problem, device)) == 12
