"""The Triton kernels, interpreted: all cases, with tiles that the lengths, windows and segments cross."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import Case, EMPTY, EVERYTHING, make, PAIRWISE, poison
from tests.attention.dense import quick
from tests.attention.inner import AttentionArrays, AttentionSpec, tile_table
from tests.attention.kernels import assert_same, check_kernels, cotangents, oracle
from tests.attention.tritons import compiled, TileConfig, TritonConfig
from tests.attention.tritons import interpreted as triton_interpret
from tests.compiled import executed
from tests.tolerances import assert_close


def tiles(*sizes: tuple[int, int]) -> TritonConfig:
    forward, keys, queries = (TileConfig(block_q, block_k, 4, 1) for block_q, block_k in sizes)
    return TritonConfig(forward, keys, queries)


TILES = (
    tiles((32, 32), (32, 32), (32, 32)),
    tiles((16, 64), (32, 16), (64, 16)),
    tiles((64, 16), (16, 64), (16, 32)),
    tiles((16, 16), (64, 32), (32, 64)),
)


def run(arrays, dout, dlse, spec, config):
    out, lse = triton_interpret.forward(arrays, spec, config)
    return out, lse, triton_interpret.backward(arrays, spec, config, out, lse, dout, dlse)


run = quick(run, static_argnums=(3, 4))


def check(case: Case, config: TritonConfig) -> None:
    """Output, log-sum-exp and all gradients; the same from poisoned arrays, bit for bit."""
    check_kernels(case, lambda arrays, dout, dlse, spec: run(arrays, dout, dlse, spec, config))


def smaller(case: Case) -> Case:
    """The same flags at a size that an interpreter likes."""
    heads = {(8, 1): (4, 1), (4, 2): (4, 2), (3, 1): (3, 1), (2, 2): (2, 2)}[case.H, case.K]
    shrink = lambda n, most: min(n, most)
    return dataclasses.replace(
        case,
        H=heads[0],
        K=heads[1],
        T=shrink(case.T, 77),
        S=shrink(case.S, 77),
        D=shrink(case.D, 96),
        V=shrink(case.V, 96),
    )


CASES = [smaller(case) for case in PAIRWISE]


@pytest.mark.few(1)
@pytest.mark.parametrize("n", range(len(CASES)), ids=lambda n: CASES[n].name)
def test_agrees_with_reference(n):
    check(CASES[n], TILES[n % len(TILES)])


@pytest.mark.slow
def test_everything_at_once():
    check(EVERYTHING, TILES[1])


@pytest.mark.few(2)
@pytest.mark.parametrize("cap", [1e-30, 1e-12, 101.0, 1e30])
def test_any_soft_cap(cap):
    """All scores at the cap, or all far from it."""
    check(Case(B=1, T=40, S=40, H=2, K=1, D=16, V=16, right=0, soft_cap=cap), TILES[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_empty(case):
    check(dataclasses.replace(case, H=2, K=1, D=16, V=16), TILES[0])


SMALL = Case(B=2, T=50, S=67, H=2, K=1, D=16, V=24)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pattern", ["BHTS", "BHT1", "BH1S", "B1TS", "1HTS", "11TS", "B1T1", "1H11", "111S", "1111"]
)
def test_ways_to_broadcast_a_bias(pattern):
    """And with it ways to sum its gradient, over tiles as well."""
    check(
        dataclasses.replace(SMALL, bias=pattern, right=0, offset=9, soft_cap=3.0),
        TILES[len(pattern.replace("1", "")) % 4],
    )


@pytest.mark.parametrize(
    "sizes, config",
    [
        # Lengths just short of, at, and just past a tile.
        (dict(B=1, T=31, S=33, right=0, offset=2), 0),
        (dict(B=1, T=32, S=32, right=0, dtype="bfloat16"), 0),
        (dict(B=1, T=33, S=31, right=0, offset=-2, dtype="float16"), 0),
        (dict(left=3, right=0, offset=17), 1),
        (dict(left=20, right=11, offset=-5), 2),
        (dict(left=0, offset=30), 1),
    ],
    ids=str,
)
def test_tile_edges(sizes, config):
    check(dataclasses.replace(SMALL, **sizes), TILES[config])


IDS = {
    "unsorted": ([0] * 20 + [1] * 25 + [0] * 19, [0] * 30 + [1] * 10 + [0] * 24),
    "interleaved": ([0, 1, 2, 3] * 16, [3, 2] * 32),
    "padding inside": ([0] * 17 + [-1] * 16 + [1] * 31, [1] * 16 + [-1] * 32 + [0] * 16),
    "one tile each": ([0] * 32 + [1] * 32, [1] * 32 + [0] * 32),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IDS)
def test_segments_across_tiles(name):
    """Ids in any order: a query whose id no key has sees nothing and may be NaN."""
    case = Case(B=1, T=64, S=64, H=2, K=1, D=16, V=16)
    q_ids, kv_ids = (jnp.asarray(x, jnp.int32)[None] for x in IDS[name])
    dout, dlse = cotangents(case)
    for config, others in (
        (TILES[0], {}),
        (TILES[2], dict(sinks=jnp.ones((1, 2)), mask=jnp.arange(64) % 7 > 0)),
    ):
        arrays, spec = make(case)
        others = {n: x[None, None, None] if n == "mask" else x for n, x in others.items()}
        arrays = arrays._replace(q_segments=q_ids, kv_segments=kv_ids, **others)
        clean = run(arrays, dout, dlse, spec, config)
        out, lse, grads, _ = oracle(case, arrays, dout, dlse)
        assert_close(clean[0], out)
        assert_close(clean[1], lse)
        for n in grads:
            assert_close(getattr(clean[2], n), grads[n], kind="gradient", name=n)
        assert_same(clean, run(poison(case, arrays), dout, dlse, spec, config))


def test_no_grid_is_too_long():
    """Only the first axis of a GPU's grid goes past 65,535: more rows of batch and heads than that, and more tiles."""
    shape = lambda *x, dtype=jnp.float16: jax.ShapeDtypeStruct(x, dtype)
    launched = []

    def execute(launch, inputs):
        launched.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def backward(*arrays):
        given, (out, lse) = AttentionArrays(*arrays[:4]), arrays[4:]
        return compiled.backward(given, AttentionSpec(1.0), TILES[0], out, lse, out, lse)

    for batch, heads, length, bias in (
        (9000, 8, 16, (9000, 8, 16, 16)),
        (1, 1, 2**21 + 64, (1, 1, 1, 2**21 + 64)),
    ):
        q, rows = shape(batch, length, heads, 16), shape(batch, heads, length, dtype=jnp.float32)
        jax.eval_shape(executed(backward, execute), q, q, q, shape(*bias), q, rows)
    assert {launch.kernel.fn.__name__ for launch in launched} >= {
        "bias_gradient_kernel",
        "key_gradient_kernel",
    }
    for launch in launched:
        assert len(launch.grid) == 1 and 65_535 < launch.grid[0] < 2**31


def test_tables_skip_what_is_hidden():
    """Packed causal documents of a tile each: one tile a row, and none of it needs a look at more."""
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 16)[None]
    arrays = make(Case(B=1, T=64, S=64, H=1, K=1, D=1, V=1))[0]._replace(q_segments=ids, kv_segments=ids)
    table = tile_table.key_tile_table(arrays, AttentionSpec(scale=1.0), 16, 16)
    np.testing.assert_array_equal(table[0], [[n, n, n + 1, n + 1] for n in range(4)])
    table = tile_table.key_tile_table(arrays, AttentionSpec(scale=1.0, right=0), 16, 16)
    np.testing.assert_array_equal(table[0, :, [0, 3]].T, [[n, n + 1] for n in range(4)])
    assert (table[0, :, 1] == table[0, :, 2]).all()


@pytest.mark.slow
def test_repeats_bit_for_bit():
    arrays, spec = make(EVERYTHING)
    assert_same(*(run(arrays, *cotangents(EVERYTHING), spec, TILES[1]) for _ in range(2)))
