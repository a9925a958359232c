"""The Pallas kernels for TPU, interpreted with races detected and memory poisoned: one case for each feature, with tiles that lengths, windows and
segments cross."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.arrays import normal
from tests.attention.cases import Case, EVERYTHING
from tests.attention.dense import quick
from tests.attention.kernels import check_kernels
from tests.attention.pallases import interpreted, PallasConfig, TileConfig
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")


def tiles(*sizes: tuple[int, int]) -> PallasConfig:
    return PallasConfig(*(TileConfig(*size) for size in sizes))


TILES = (tiles((128, 128), (128, 128), (128, 128)), tiles((256, 128), (128, 256), (128, 256)))


def run(arrays, dout, dlse, spec, config):
    out, lse = interpreted.forward(arrays, spec, config)
    return out, lse, interpreted.backward(arrays, spec, config, out, lse, dout, dlse)


run = quick(run, static_argnums=(3, 4))
SMALL = Case(B=2, T=140, S=200, H=2, K=1, D=16, V=24)
CASES = {
    "scattered, bias of keys": (
        dataclasses.replace(SMALL, rows="scattered", bias="1H1S", mask="11TS", alibi="1H", sinks="1H"),
        TILES[0],
    ),
    "everything": (dataclasses.replace(EVERYTHING, T=140, S=200, H=4, offset=60), TILES[0]),
    "bfloat16, bias of rows, wide tiles": (
        dataclasses.replace(SMALL, bias="B1TS", right=0, offset=60, soft_cap=3.0, dtype="bfloat16"),
        TILES[1],
    ),
    "window, segments": (
        dataclasses.replace(SMALL, left=20, right=11, offset=-5, segments=True, dropout=0.3),
        TILES[1],
    ),
    "lengths 192": (
        Case(B=2, T=130, S=128, H=2, K=1, D=192, V=128, rows="lengths", dtype="bfloat16"),
        TILES[0],
    ),
    "no keys": (Case(S=0, H=2, K=1, D=16, V=16, sinks="1H", bias="1HTS", alibi="1H"), TILES[0]),
    "sees nothing": (Case(H=2, K=1, D=16, V=16, right=0, offset=-200, sinks="BH"), TILES[0]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "wide tiles" in n else pytest.mark.slow) for n in CASES]
)
def test_agrees_with_reference(name):
    case, config = CASES[name]
    check_kernels(case, lambda arrays, dout, dlse, spec: run(arrays, dout, dlse, spec, config))


# Operations


INPUTS = [normal(n, (2, 150, heads, 16)) for n, heads in enumerate((4, 2, 2))]


def agrees(ours: Any, theirs: Any, *given: Any) -> None:
    """Values and gradients of a call on Pallas and on XLA."""

    def loss(call: Any, *given: Any) -> Any:
        out, lse = call(*given)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *a: loss(call, *a), (0, 1, 2)))  # noqa: B023
        for call in (ours, theirs)
    )
    expected = wanted(*(np.asarray(x) for x in given))
    for a, b in zip(jax.tree.leaves(found(*given)), jax.tree.leaves(expected), strict=True):
        assert_close(np.asarray(a), np.asarray(b), kind="gradient")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["crossed", "heads", "pattern"])
def test_block_sparse_attention(case):
    """Under `vmap` where heads have maps of their own."""
    rng, mask = np.random.default_rng(1), None
    options: dict[str, Any] = {}
    size = {"crossed": (64, 96), "heads": (128, 128), "pattern": (16, 16)}[case]
    grid = tuple(-(-150 // n) for n in size)
    if case == "pattern":
        mask = ejx.Mask.from_blocks(rng.random(grid) < 0.3, size)
    else:
        table = rng.random((2, 4, *grid) if case == "heads" else grid) < 0.5
        options = dict(block_map=jnp.asarray(table), block_size=size)

    def call(platform: Any) -> Any:
        module: Any = ejx.BlockSparseAttention(mask, platform=platform, **options)
        mapped = lambda *given: module(*given, return_lse=True)
        return jax.vmap(mapped) if case == "crossed" else mapped

    agrees(call("pallas-interpret"), call("xla"), *INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_over_devices(kind):
    """Batch and heads are split; each device interprets its own."""
    mesh_axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(mesh_axis,) * 2)
    spec = P("dp", None, "tp")
    calls = {}
    for platform in ("pallas-interpret", "xla"):
        module = ejx.FlashAttention(causal=True, platform=platform)
        calls[platform] = functools.partial(module, return_lse=True)
    ours, theirs = calls.values()
    if kind == "shard_map":
        ours = jax.shard_map(ours, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec))
    agrees(ours, theirs, *(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in INPUTS))


def test_what_it_does_not_take():
    q = jnp.zeros((1, 8, 1, 16), jnp.float16)
    with pytest.raises(ejx.UnsupportedError, match="takes float32 and bfloat16, not float16"):
        ejx.FlashAttention(platform="pallas-interpret")(q, q, q)
    with pytest.raises(ValueError, match="a positive multiple of 128"):
        TileConfig(64, 128)
