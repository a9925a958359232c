import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, dispatch, Problem
from tests.dispatch.toy import H200

BASE: dict[str, Any] = dict(
    dims={"B": 2, "T": 1000, "D": 64},
    dtypes={"q": "bfloat16", "bias": "float32"},
    flags={"causal": True, "window": "9,0", "cap": 30.0, "mask": None},
    lengths={"B", "T"},
)


def make(operation: Any = "op", **changed: Any) -> Problem:
    return Problem.make(operation, **{**BASE, **changed})


def test_fields():
    problem = make()
    assert problem.dim("T") == 1000 and problem.dtype("q") == "bfloat16"
    assert problem.flag("window") == "9,0"
    assert problem.flag("mask") is problem.flag("never given") is None
    assert str(problem) == "op B2 D64 T1000 float32/bfloat16 cap=30.0 causal window=9,0"
    assert make(dtypes={"q": jnp.bfloat16.dtype, "bias": np.dtype("float32")}) == problem


def test_order_does_not_matter():
    reordered = make(dims=dict(reversed(BASE["dims"].items())), flags=dict(reversed(BASE["flags"].items())))
    assert reordered == make() and hash(reordered) == hash(make()) and reordered.key() == make().key()


def test_lengths_share_buckets():
    lengths = np.random.default_rng(0).integers(1, 100_000, 50)
    buckets = {}
    for t in lengths:
        key = make(dims={**BASE["dims"], "T": int(t)}).key()
        buckets.setdefault(key, []).append(int(t))
    assert len(buckets) <= 17
    for members in buckets.values():
        assert max(members) < 2 * min(members)
    # A power of two is the top of its bucket, and a head dim is not a length.
    keys = [make(dims={**BASE["dims"], "T": t}).key() for t in (1023, 1024, 1025)]
    assert keys[0] == keys[1] != keys[2]
    assert make(dims={**BASE["dims"], "D": 63}).key() != make().key()
    assert make(dims={**BASE["dims"], "T": 0}).key() != make(dims={**BASE["dims"], "T": 1}).key()


def test_key_is_json_of_the_bucketed_problem():
    assert json.loads(make().key()) == {
        "operation": "op",
        "dims": {"B": 2, "T": 1024, "D": 64},
        "dtypes": BASE["dtypes"],
        "flags": BASE["flags"],
    }


def test_folders_and_headers_of_tables_stay_what_they_were():
    assert ejx.device_fingerprint(H200) == "nvidia_h200-ab9d6707"
    same = dataclasses.replace(H200, vmem=1, memory=2, runtime="CUDA 12", count=8)
    assert ejx.device_fingerprint(same) == ejx.device_fingerprint(H200)
    assert same.to_dict() == H200.to_dict() and DeviceFacts.from_dict(H200.to_dict()) == H200


@pytest.mark.parametrize(
    "capability, expected", [("9.0", (9, 0)), ("12.1", (12, 1)), ("", (0, 0)), ("gfx942", (0, 0))]
)
def test_capability(capability, expected):
    assert DeviceFacts(Backend.GPU, "x", compute_capability=capability).capability == expected


def test_an_unknown_architecture_gets_the_smallest_limit():
    assert dispatch.device.shared_memory_limit("nvidia", "9.0") == 232_448
    assert dispatch.device.shared_memory_limit("nvidia", "99.0") == min(
        dispatch.device.shared_memory_limit("nvidia", c) for c in ("8.0", "8.6", "9.0", "12.0")
    )
    assert dispatch.device.shared_memory_limit("amd", "gfx942") == 65_536


@pytest.mark.parametrize("kind", sorted(dispatch.device._VMEM_MIB))
def test_vector_memory_is_as_jax_knows_it(kind):
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    version = info.chip_version_from_device_kind(kind)
    if version is None:
        pytest.skip("a kind that this JAX does not know yet")
    assert dispatch.device.vmem_capacity(kind) == info.get_tpu_info_for_chip(version, 1).vmem_capacity_bytes
