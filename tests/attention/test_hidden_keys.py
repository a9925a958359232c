"""Keys that no query sees may hold NaN, also where several conditions hide them together, of which each alone shows them to some query."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.masks import tile_table
from tests.attention.dense import normal

IDS = jnp.array([[0, 0, 0, 1, 1, 1]])
LAST = jnp.arange(6) == 5
CASES: dict[str, tuple[dict[str, Any], slice]] = {
    "segments and lengths of queries": ({"segment_ids": IDS, "q_lengths": jnp.array([3])}, slice(3, 6)),
    "segments of others": ({"mask": ejx.Mask.from_segments(IDS, 2 * IDS)}, slice(3, 6)),
    "two pairs of segments": (
        {"segment_ids": IDS, "mask": ejx.Mask.from_segments(0 * IDS, LAST[None].astype(jnp.int32))},
        slice(5, 6),
    ),
    "dense and causal": ({"causal": True, "mask": ~(LAST[:, None] & LAST[None])[None, None]}, slice(5, 6)),
    "dense and segments": (
        {"segment_ids": IDS, "mask": ~((jnp.arange(6) >= 3)[:, None] & LAST[None])[None, None]},
        slice(5, 6),
    ),
}


def agrees_with_clean_keys(call: Any, arrays: dict[str, jax.Array], hidden: slice) -> None:
    """The results and gradients with NaN in keys, values and their rotary part are those without."""

    def results(arrays: dict[str, jax.Array]) -> Any:
        out, pull = jax.vjp(call, arrays)
        return out, pull(jnp.cos(out))[0]

    poisoned = {name: x if name == "q" else x.at[:, hidden].set(jnp.nan) for name, x in arrays.items()}
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(results(poisoned)), jax.tree.leaves(results(arrays)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "platform", ["xla", "triton-interpret", pytest.param("pallas-interpret", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, platform):
    if platform == "triton-interpret":
        pytest.importorskip("triton")
    options, hidden = CASES[name]
    arrays = {letter: normal(i, 1, 6, 2, 16) for i, letter in enumerate("qkv")}
    agrees_with_clean_keys(
        lambda arrays: ejx.flash_attention(**arrays, **options, platform=platform), arrays, hidden
    )


@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_latent_attention(platform):
    if platform == "triton-interpret":
        pytest.importorskip("triton")
    options, hidden = CASES["segments and lengths of queries"]
    shapes = {"q": (2, 20), "k": (2, 16), "v": (2, 16), "k_rope": (4,)}
    arrays = {name: normal(i, 1, 6, *shape) for i, (name, shape) in enumerate(shapes.items())}
    op: Any = ejx.MultiHeadLatentAttention(causal=False, platform=platform)
    agrees_with_clean_keys(lambda arrays: op(**arrays, **options), arrays, hidden)


def test_pairs_by_blocks_of_queries(monkeypatch):
    """Long rows are looked at in parts; seven queries leave a part that is not full."""
    rng = np.random.default_rng(0)
    start, ids, others = (jnp.asarray(rng.integers(-1, 3, (2, n))) for n in (7, 7, 11))
    start, end = jnp.maximum(start, 0), jnp.maximum(start, 0) + jnp.asarray(rng.integers(0, 9, (2, 7)))
    keys = np.arange(11)
    pairs = (np.asarray(start)[..., None] <= keys) & (keys < np.asarray(end)[..., None])
    pairs &= (np.asarray(ids)[..., None] == np.asarray(others)[:, None]) & (np.asarray(ids) >= 0)[..., None]
    for most in (1, 33, 2**26):
        monkeypatch.setattr(tile_table, "_PAIRS", most)
        sees, are_seen = tile_table._paired(start, end, ids, others)
        np.testing.assert_array_equal(sees, pairs.any(-1))
        np.testing.assert_array_equal(are_seen, pairs.any(-2))
