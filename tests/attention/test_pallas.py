"""The Pallas kernels for TPU, interpreted with races detected and memory poisoned: a part of the cases, with tiles that lengths, windows and
segments cross; JAX's own kernel is a peer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.masks.tile_table import overlap
from ejkernel_eqx.attention.pallas import interpreted
from ejkernel_eqx.attention.pallas.compiled import PallasConfig, TileConfig
from ejkernel_eqx.attention.pallas.steps import FIRST, key_steps, LAST, PARTLY, query_steps, unpacked, WHOLE
from ejkernel_eqx.attention.reference import visibility
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from tests.attention.cases import Case, EMPTY, every_fourth, EVERYTHING, make, PAIRWISE
from tests.attention.dense import quick
from tests.attention.kernels import check_kernels
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")


def tiles(*sizes: tuple[int, int]) -> PallasConfig:
    return PallasConfig(*(TileConfig(*size) for size in sizes))


TILES = (tiles((128, 128), (128, 128), (128, 128)), tiles((256, 128), (128, 256), (128, 256)))


def run(arrays, dout, dlse, spec, config):
    out, lse = interpreted.platform.forward(arrays, spec, config)
    return out, lse, interpreted.platform.backward(arrays, spec, config, out, lse, dout, dlse)


run = quick(run, static_argnums=(3, 4))


def check(case: Case, config: PallasConfig = TILES[0]) -> None:
    check_kernels(case, lambda arrays, dout, dlse, spec: run(arrays, dout, dlse, spec, config))


def fitted(case: Case) -> Case:
    """The same flags at sizes that cross tiles of 128, and in a type that TPUs have."""
    longer = lambda n: {127: 200, 63: 140, 65: 130, 64: 64, 7: 7, 1: 1}.get(n, n)
    heads = {(8, 1): (4, 1)}.get((case.H, case.K), (case.H, case.K))
    dtype = "bfloat16" if case.dtype == "float16" else case.dtype
    return dataclasses.replace(case, T=longer(case.T), S=longer(case.S), H=heads[0], K=heads[1], dtype=dtype)


SUBSET = [fitted(case) for case in PAIRWISE[1::9]]


@pytest.mark.few(1)
@pytest.mark.parametrize("n", every_fourth(SUBSET))
def test_agrees_with_reference(n):
    check(SUBSET[n], TILES[n % 2])


@pytest.mark.slow
def test_everything_at_once():
    check(dataclasses.replace(fitted(EVERYTHING), T=140, S=200, offset=60))


@pytest.mark.slow
@pytest.mark.parametrize("case", EMPTY[1::2], ids=lambda case: case.name)
def test_empty(case):
    check(dataclasses.replace(case, H=2, K=1, D=16, V=16))


SMALL = Case(B=2, T=140, S=200, H=2, K=1, D=16, V=24)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["B1TS", "1H1S"])
def test_ways_to_broadcast_a_bias(pattern):
    """And with them ways to sum its gradient, over tiles as well."""
    check(dataclasses.replace(SMALL, bias=pattern, right=0, offset=60, soft_cap=3.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "window", [dict(left=3, right=0, offset=60), dict(left=20, right=11, offset=-5)], ids=str
)
def test_windows_across_tiles(window):
    check(dataclasses.replace(SMALL, **window))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(80, 80), (192, 128), (256, 256)], ids=str)
def test_head_dims(dims):
    check(Case(B=1, T=130, S=128, H=2, K=1, D=dims[0], V=dims[1], dtype="bfloat16"))


# Steps


@pytest.mark.few(2)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("kind", ["causal", "ranges", "map"])
def test_steps_are_the_visible_tiles(kind, by_key):
    """Each visible tile is there once, those of one tile together, whole tiles marked so; a tile with none has one step."""
    case = {"causal": dict(right=0), "ranges": dict(rows="scattered"), "map": dict()}[kind]
    arrays, spec = make(Case(B=2, T=600, S=500, H=4, K=2, D=1, V=1, **case))
    heads = 1
    if kind == "map":
        rng = np.random.default_rng(0)
        arrays = arrays._replace(blocks=jnp.asarray(rng.random((2, 4, 5, 4)) < 0.4))
        spec = dataclasses.replace(spec, block_size=(128, 128))
        heads = 4
    steps, _ = (key_steps if by_key else query_steps)(arrays, spec, 128, 128)
    assert isinstance(steps.count, int) == (kind == "causal") and steps.split_heads == (heads == 4)
    seen = np.asarray(jax.jit(visibility, static_argnums=1)(arrays, spec))  # [B, H, T, S]
    padded = np.pad(seen, ((0, 0), (0, 0), (0, 40), (0, 12)))
    some: Any = padded.reshape(2, 4, 5, 128, 4, 128).any((3, 5))
    table = np.asarray(steps.table).reshape(-1, steps.stride)
    programs = 2 if by_key else 4
    for b, h in np.ndindex(2, programs):
        row = 0 if steps.rows is None else steps.rows[b * programs + h]
        parts = unpacked(jnp.asarray(table[row][: int(steps.count)]))
        entries = list(zip(*(np.asarray(part).tolist() for part in parts), strict=True))
        ran = [(own, other, head) for flags, own, other, head in entries if flags & (WHOLE | PARTLY)]
        assert len(set(ran)) == len(ran)
        mine = some[b, h * 2 : h * 2 + 2] if by_key else some[b, h : h + 1]
        for own, other, head in ran:
            tile = mine[head if steps.split_heads and by_key else slice(None)]
            assert (tile[..., other, own] if by_key else tile[..., own, other]).any() or kind == "ranges"
        wanted = {
            (n, m, g if steps.split_heads else 0) if by_key else (m, n, 0) for g, m, n in np.argwhere(mine)
        }
        assert wanted <= set(ran)
        active = [entry for entry in entries if entry[0]]
        owns = [own for _, own, _, _ in active]
        assert owns == sorted(owns) and set(owns) == set(range(4 if by_key else 5))
        for at, (flags, own, _, _) in enumerate(active):
            assert bool(flags & FIRST) == (at == 0 or owns[at - 1] != own)
            assert bool(flags & LAST) == (at == len(owns) - 1 or owns[at + 1] != own)
    assert overlap(arrays, spec, 128, 128)[0].shape[-2:] == (5, 4)


# Operations


@pytest.mark.slow
def test_flash_attention_interpreted():
    """Through the operation, with `vmap`."""
    key = jax.random.key(0)
    q, k, v = (jax.random.normal(n, (2, 3, 40, 2, 16)) for n in jax.random.split(key, 3))
    ours = ejx.FlashAttention(causal=True, platform="pallas-interpret")
    reference = ejx.FlashAttention(causal=True, platform="xla")
    loss = lambda module: lambda *given: (jax.vmap(module)(*given) ** 2).sum()
    found = jax.jit(jax.value_and_grad(loss(ours), (0, 1, 2)))(q, k, v)
    wanted = jax.jit(jax.value_and_grad(loss(reference), (0, 1, 2)))(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def blocks_of(case: str) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(1)
    size = {"crossed": (64, 96), "heads": (128, 128), "pattern": (16, 16)}[case]
    grid = tuple(-(-n // s) for n, s in zip((300, 260), size, strict=True))
    if case == "pattern":
        return ejx.Mask.from_blocks(rng.random(grid) < 0.3, size), {}
    shape = (2, 4, *grid) if case == "heads" else grid
    return None, {"block_map": jnp.asarray(rng.random(shape) < 0.5), "block_size": size}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["crossed", "heads", "pattern"])
def test_block_sparse_attention_interpreted(case):
    mask, more = blocks_of(case)
    size = more.pop("block_size", None)
    key = jax.random.key(0)
    shapes = [(2, 300, 4, 16), (2, 260, 2, 16), (2, 260, 2, 16)]
    given = [jax.random.normal(n, s) for n, s in zip(jax.random.split(key, 3), shapes, strict=True)]
    options = {} if size is None else {"block_size": size}

    def loss(platform, *given):
        module = ejx.BlockSparseAttention(mask, platform=platform, **options)
        out, lse = module(*given, **more, return_lse=True)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    call = lambda platform: jax.jit(jax.value_and_grad(functools.partial(loss, platform), (0, 1, 2)))(*given)
    found, wanted = call("pallas-interpret"), call("xla")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_what_it_does_not_take():
    q = jnp.zeros((1, 8, 1, 16), jnp.float16)
    with pytest.raises(ejx.UnsupportedError, match="takes float32 and bfloat16, not float16"):
        ejx.FlashAttention(platform="pallas-interpret")(q, q, q)
    with pytest.raises(ValueError, match="a positive multiple of 128"):
        TileConfig(64, 128)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_splash_attention_is_a_peer(dtype):
    """JAX's own kernel, interpreted on the same inputs, is as far from the truth."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q, k, v = (jax.random.normal(n, (1, 256, 2, 128), dtype) for n in jax.random.split(jax.random.key(0), 3))
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256))] * 2)
    sizes = splash.BlockSizes(block_q=128, block_kv=128, block_kv_compute=128)
    peer = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=True)
    scaled = q * jnp.asarray(128**-0.5, dtype)
    out: Any = peer(*(x[0].swapaxes(0, 1) for x in (scaled, k, v)))
    theirs = out.swapaxes(0, 1)[None]
    arrays, spec = AttentionArrays(q, k, v), AttentionSpec(128**-0.5, right=0)
    ours, _ = interpreted.platform.forward(arrays, spec, TILES[0])
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    exact, _ = reference.attend(AttentionArrays(wide_q, wide_k, wide_v), spec)
    error = lambda x: float(jnp.abs(x.astype(jnp.float32) - exact).max())
    assert_close(ours, exact, dtype)
    assert error(ours) <= 1.5 * error(theirs) + 1e-6


@pytest.mark.slow
def test_flash_attention_is_a_peer():
    """JAX's older kernel, in the same way, and its gradients."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    given = tuple(
        jax.random.normal(n, (1, 256, 1, 128), jnp.bfloat16) for n in jax.random.split(jax.random.key(0), 4)
    )
    by_head = lambda x: x.swapaxes(1, 2)

    def peer(*given: Any) -> Any:
        return by_head(flash_attention(*map(by_head, given), causal=True, sm_scale=128**-0.5))

    spec = AttentionSpec(128**-0.5, right=0)

    def ours(*given: Any) -> Any:
        return ejx.FlashAttention(causal=True, platform="pallas-interpret")(*given)

    def exact(*given: Any) -> Any:
        return reference.attend(AttentionArrays(*given), spec)[0]

    def both(call: Any, *given: Any) -> Any:
        out, pull = jax.vjp(call, *given[:3])
        return out, *pull(given[3].astype(out.dtype))

    with pltpu.force_tpu_interpret_mode(), jax.numpy_dtype_promotion("standard"):
        theirs = both(peer, *given)
    truth = both(exact, *(x.astype(jnp.float32) for x in given))
    error = lambda x, y: float(jnp.abs(x.astype(jnp.float32) - y).max())
    for mine, other, right in zip(both(ours, *given), theirs, truth, strict=True):
        assert_close(mine, right, "bfloat16", "gradient")
        assert error(mine, right) <= 1.5 * error(other, right) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_over_devices(kind):
    """Batch and heads are split; each device interprets its own."""
    given = [
        jax.random.normal(n, (2, 130, h, 16))
        for n, h in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
    ]
    op = lambda platform: ejx.FlashAttention(causal=True, platform=platform)
    loss = lambda module: lambda *given: (module(*given) ** 2).sum()
    wanted = jax.jit(jax.value_and_grad(loss(op("xla")), (0, 1, 2)))(*given)
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(axis,) * 2)
    spec = P("dp", None, "tp")
    module = op("pallas-interpret")
    call = (
        module
        if kind == "explicit"
        else jax.shard_map(module, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    )
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in given]
    found = jax.jit(jax.value_and_grad(loss(call), (0, 1, 2)))(*placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
