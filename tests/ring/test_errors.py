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


def place(arrays: dict[str, Any], *spec: Any, kind: str = "explicit") -> dict[str, Any]:
    """On a mesh of two devices for data and four for tokens."""
    sharding = NamedSharding(mesh_of(kind, 4, data=2), P(*spec))
    return {name: jax.device_put(x, sharding) for name, x in arrays.items()}


RING: Any = ejx.RingAttention
ROWS: dict[str, Any] = qkv(2, t=8, s=8)
IDS = jnp.zeros((2, 8), jnp.int32)
WRONG: dict[str, tuple[dict[str, Any], Any]] = {
    r"tokens in 4 equal parts over the 4 devices .* received 18; pad them to 20": ({}, lambda kind: place(qkv(2, t=18, s=18), kind=kind)),
    r"in 8 equal parts .* received 12; pad them to 16": (dict(order="zigzag"), lambda kind: place(qkv(2, t=12, s=12), kind=kind)),
    r"axis_name: expected an axis of the mesh, .*'data', 'sequence'.* received 'seq'": (dict(axis_name="seq"), lambda kind: place(ROWS, kind=kind)),
    r"q: expected axis 'sequence' to split the tokens, received .*; reshard": ({}, lambda kind: place(qkv(4, t=8, s=8), AXIS)),
    r"q: expected tokens that are split over axis 'sequence' or not at all": ({}, lambda kind: place(qkv(4, t=8, s=8), None, "data")),
    r"6 query and 3 key heads cannot be split over 4 devices; use method='ring'":
        (dict(method="all_to_all"), lambda kind: place(qkv(2, t=8, s=8, heads=6, kv_heads=3), None, AXIS)),
    r"mask: expected a Mask of windows": ({}, lambda kind: ROWS | dict(mask=ejx.Mask.strided(2))),
    r"segment_ids: expected one pair of ids, received 2": ({}, lambda kind: ROWS | dict(segment_ids=IDS, mask=ejx.Mask.from_segments(IDS, IDS))),
    r"expected None with cu_seqlens, received both": ({}, lambda kind: qkv(t=8, s=8) | dict(segment_ids=IDS[0], cu_seqlens=jnp.array([0, 8]))),
    r"axis_name: expected the name of one mesh axis": (dict(axis_name=None), None),
    r"order: expected 'contiguous' or 'zigzag', received 'striped'": (dict(order="striped"), None),
    r"method: expected 'ring', 'all_to_all' or None": (dict(method="ulysses"), None),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message, unchecked):
    """On automatic meshes as on explicit ones, where it is the mesh that is wrong."""
    options, arrays = WRONG[message]
    for kind in ("explicit", "automatic"):
        with pytest.raises(ValueError, match=message):
            module: Any = RING(**{"axis_name": AXIS} | options)
            module(**arrays(kind))


def test_an_axis_that_is_not_manual():
    mesh = mesh_of("automatic", 4, data=2)
    module = ejx.RingAttention("other")
    call = jax.shard_map(lambda a: module(**a), mesh=mesh, in_specs=P(None, AXIS), out_specs=P(None, AXIS))
    with pytest.raises(ValueError, match=r"axis_name: expected an axis that shard_map has made manual"):
        call(ROWS)
