"""Block-sparse attention on a GPU: the kernels with lists of tiles against the float32 reference, every pattern and every way to hide by arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask
from ejkernel_eqx.dispatch import device_facts
from tests.attention.dense import qkv, with_gradients
from tests.attention.patterns import DATA, data, defined, H, PATTERNS, S, SIZE, T
from tests.attention.test_block_sparse import poisoned
from tests.gpu.host import candidates, example_problem
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION: Any = ejx.BlockSparseAttention
NEEDS = OPERATION.operation


def check(op: Any, arrays: dict[str, jax.Array], seen: Any, dtype: str, **given: Any) -> None:
    """Output, lse and gradients; the same again, bit for bit, and with NaN in what is hidden."""
    dense: Any = ejx.FlashAttention(platform="xla")
    keys = jax.random.split(jax.random.key(9))
    shape = arrays["q"].shape
    dout, dlse = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape[:-1])
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    mask = jnp.asarray(np.broadcast_to(seen, (shape[0], shape[2], *seen.shape[-2:])))
    run = jax.jit(
        lambda arrays: with_gradients(lambda a: op(**a, **given, return_lse=True), arrays, dout, dlse)
    )
    exact = jax.jit(
        lambda arrays: with_gradients(lambda a: dense(**a, mask=mask, return_lse=True), arrays, dout, dlse)
    )
    found, (expected, gradients) = run(arrays), exact(wide)
    for name, x, y in zip(("out", "lse"), found[0], expected, strict=True):
        assert_close(x, y, dtype, name=name)
    for name in arrays:
        assert_close(found[1][name], gradients[name], dtype, "gradient", name=f"gradient of {name}")
    for again in (run(arrays), run(poisoned(arrays, np.asarray(mask)))):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, dtype):
    arrays = qkv(2, t=T, s=S, heads=H, kv_heads=2, d=64, v=64, dtype=jnp.dtype(dtype))
    op = OPERATION(PATTERNS[name].mask, platform="triton")
    check(op, arrays, defined(PATTERNS[name].sees), dtype)


@pytest.mark.parametrize("name", DATA)
def test_arrays_that_hide(name):
    given, seen = data(name)
    arrays = qkv(2, t=T, s=T, heads=H, kv_heads=1, d=128, v=128, dtype=jnp.bfloat16)
    check(OPERATION(block_size=SIZE, platform="triton"), arrays, seen, "bfloat16", **given)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_rows(head_dim):
    """Many tiles, most of them whole."""
    length = 2048
    mask = Mask.causal() & (Mask.sliding_window(300) | Mask.global_tokens(70))
    i = np.arange(length)
    seen = (i <= i[:, None]) & ((i >= i[:, None] - 300) | (i < 70) | (i[:, None] < 70))
    arrays = qkv(1, t=length, s=length, heads=H, kv_heads=2, d=head_dim, v=head_dim, dtype=jnp.bfloat16)
    check(OPERATION(mask, platform="triton"), arrays, seen, "bfloat16")
    table = np.random.default_rng(0).random((1, H, 16, 16)) < 0.3
    blocks = table.repeat(128, -2).repeat(128, -1)
    check(OPERATION(platform="triton"), arrays, blocks, "bfloat16", block_map=jnp.asarray(table))


@pytest.mark.parametrize("block_size", [(64, 64), (128, 128), (48, 80)])
def test_every_candidate(block_size):
    """Of maps whose blocks are made of tiles, and of others."""
    length = 512
    rows, columns = (-(-length // size) for size in block_size)
    table = np.random.default_rng(0).random((1, 1, rows, columns)) < 0.4
    seen = table.repeat(block_size[0], -2).repeat(block_size[1], -1)[..., :length, :length]
    arrays = qkv(1, t=length, s=length, heads=H, kv_heads=2, d=128, v=128, dtype=jnp.bfloat16)
    flags = {"block_size": block_size, "causal": False, "top_left": True}
    problem = example_problem(OPERATION.operation, dict(T=length, H=H, K=2, D=128), "bfloat16", flags)
    for config in candidates(OPERATION.operation, problem):
        op = OPERATION(block_size=block_size, config=config)
        check(op, arrays, seen, "bfloat16", block_map=jnp.asarray(table))


# Hopper's kernel over lists.


def on_hopper(block_k: int = 128, stages: int = 2) -> Any:
    from ejkernel_eqx.attention.triton.compiled import TileConfig, TritonConfig

    if device_facts().capability != (9, 0):
        pytest.skip("needs a Hopper")
    other = TileConfig(64, 64, 4, 2)
    return TritonConfig(
        TileConfig(128, block_k, 4, stages, 0, device_facts().num_multiprocessors), other, other
    )


# The other patterns look positions up in tables of 70 queries and 77 keys.
@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"documents", "blocks", "no such blocks"}))
def test_hopper_takes_patterns(name):
    """Fewer queries than keys, several tiles of both, the last ones not whole, heads with lists of their own, rows without keys."""
    arrays = qkv(2, t=700, s=770, heads=H, kv_heads=2, d=128, v=128, dtype=jnp.bfloat16)
    op = OPERATION(PATTERNS[name].mask, config=on_hopper())
    check(op, arrays, defined(PATTERNS[name].sees, 700, 770), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim, block_k, stages", [(64, 128, 4), (64, 64, 4), (96, 128, 2), (128, 64, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_takes_maps(head_dim, block_k, stages, dtype, causal):
    """Maps of each head and batch row, as data: rows and columns of blocks without anything, and other values without another compilation."""
    length, blocks = 1300, 11
    arrays = qkv(2, t=length, s=length, heads=H, kv_heads=2, d=head_dim, v=head_dim, dtype=jnp.dtype(dtype))
    op = OPERATION(Mask.causal() if causal else None, block_size=128, config=on_hopper(block_k, stages))
    i = np.arange(length)
    for seed in range(2):
        table = np.random.default_rng(seed).random((2, H, blocks, blocks)) < 0.3
        table[0, :, seed], table[1, seed, :, 3] = False, False
        seen = table.repeat(128, -2).repeat(128, -1)[..., :length, :length]
        check(op, arrays, seen & (i <= i[:, None]) if causal else seen, dtype, block_map=jnp.asarray(table))


def test_hopper_under_vmap_and_scan():
    arrays = qkv(3, t=600, s=600, heads=H, kv_heads=2, d=128, v=128, dtype=jnp.bfloat16)
    mask = Mask.causal() & (Mask.sliding_window(200) | Mask.global_tokens(50))
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0])
    op = OPERATION(mask, config=on_hopper(), logits_soft_cap=20.0)
    call = lambda a: op(**a, sinks=sinks)
    expected = jax.jit(call)(arrays)
    apart = jax.tree.map(lambda x: x[:, None], arrays)
    mapped = jax.jit(jax.vmap(call))(apart)[:, 0]
    scanned = jax.jit(lambda a: jax.lax.scan(lambda c, x: (c, call(x)), None, a)[1])(apart)[:, 0]
    for found in (mapped, scanned):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    other = OPERATION(mask, platform="xla", logits_soft_cap=20.0)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    assert_close(expected, jax.jit(lambda a: other(**a, sinks=sinks))(wide), "bfloat16")
