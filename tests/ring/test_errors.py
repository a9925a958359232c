"""Errors of calls over several devices: raised while tracing, before any kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.dense import qkv
from tests.ring.calls import AXIS, mesh_of


@pytest.fixture(params=["explicit", "automatic"])
def place(request):
    mesh = mesh_of(request.param, 4, data=2)
    return lambda arrays, *spec: {
        name: jax.device_put(x, NamedSharding(mesh, P(*spec))) for name, x in arrays.items()
    }


def test_tokens_that_do_not_divide(place):
    arrays = place(qkv(2, t=18, s=18))
    with pytest.raises(
        ValueError, match=r"tokens in 4 equal parts over the 4 devices .* received 18; pad them to 20"
    ):
        ejx.RingAttention(AXIS)(**arrays)
    with pytest.raises(ValueError, match=r"in 8 equal parts .* received 12; pad them to 16"):
        ejx.RingAttention(AXIS, order="zigzag")(**place(qkv(2, t=12, s=12)))


def test_an_axis_that_the_mesh_lacks(place):
    with pytest.raises(
        ValueError, match=r"axis_name: expected an axis of the mesh, .*'data', 'sequence'.* received 'seq'"
    ):
        ejx.RingAttention("seq")(**place(qkv(2, t=8, s=8)))


def test_an_axis_that_splits_something_else():
    mesh = mesh_of("explicit", 4, data=2)
    rows = NamedSharding(mesh, P(AXIS))
    arrays = {name: jax.device_put(x, rows) for name, x in qkv(4, t=8, s=8).items()}
    with pytest.raises(
        ValueError, match=r"q: expected axis 'sequence' to split the tokens, received .*; reshard"
    ):
        ejx.RingAttention(AXIS)(**arrays)
    tokens = NamedSharding(mesh, P(None, "data"))
    arrays = {name: jax.device_put(x, tokens) for name, x in qkv(4, t=8, s=8).items()}
    with pytest.raises(
        ValueError, match=r"q: expected tokens that are split over axis 'sequence' or not at all"
    ):
        ejx.RingAttention(AXIS)(**arrays)


def test_an_axis_that_is_not_manual():
    mesh = mesh_of("automatic", 4, data=2)
    module = ejx.RingAttention("other")
    call = jax.shard_map(lambda a: module(**a), mesh=mesh, in_specs=P(None, AXIS), out_specs=P(None, AXIS))
    with pytest.raises(ValueError, match=r"axis_name: expected an axis that shard_map has made manual"):
        call(qkv(2, t=8, s=8))


def test_options(unchecked):
    with pytest.raises(ValueError, match=r"axis_name: expected the name of one mesh axis"):
        ejx.RingAttention(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"order: expected 'contiguous' or 'zigzag', received 'striped'"):
        ejx.RingAttention(AXIS, order="striped")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"method: expected 'ring', 'all_to_all' or None"):
        ejx.RingAttention(AXIS, method="ulysses")  # pyright: ignore[reportArgumentType]


def test_masks_that_no_part_can_be_taken_of():
    arrays: dict[str, Any] = qkv(2, t=8, s=8)
    packed: dict[str, Any] = qkv(t=8, s=8)
    with pytest.raises(ValueError, match=r"mask: expected a Mask of windows"):
        ejx.RingAttention(AXIS)(**arrays, mask=ejx.Mask.strided(2))
    ids = jnp.zeros((2, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids: expected one pair of ids, received 2"):
        ejx.RingAttention(AXIS)(**arrays, segment_ids=ids, mask=ejx.Mask.from_segments(ids, ids))
    with pytest.raises(ValueError, match=r"expected None with cu_seqlens, received both"):
        ejx.RingAttention(AXIS)(**packed, segment_ids=ids[0], cu_seqlens=jnp.array([0, 8]))


def test_heads_that_cannot_be_exchanged():
    mesh = mesh_of("explicit", 4)
    arrays = {
        name: jax.device_put(x, NamedSharding(mesh, P(None, AXIS)))
        for name, x in qkv(2, t=8, s=8, heads=6, kv_heads=3).items()
    }
    with pytest.raises(
        ValueError, match=r"6 query and 3 key heads cannot be split over 4 devices; use method='ring'"
    ):
        ejx.RingAttention(AXIS, method="all_to_all")(**arrays)
