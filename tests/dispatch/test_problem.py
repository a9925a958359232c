import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx
from ejkernel_eqx.dispatch import Backend, device_facts, device_fingerprint, DeviceFacts, Problem
from ejkernel_eqx.dispatch.device import _facts, _VMEM_MIB, shared_memory_limit, vmem_capacity

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
    assert (
        problem.flag("window") == "9,0"
        and problem.flag("mask") is None
        and problem.flag("never given") is None
    )
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


@pytest.mark.parametrize("group", ["dims", "dtypes", "flags"])
def test_every_field_is_in_the_key(group):
    other = {
        int: lambda x: 4 * x,
        str: lambda x: x + "x",
        bool: lambda x: not x,
        float: lambda x: 2 * x,
        type(None): lambda x: 1,
    }
    for name, value in BASE[group].items():
        changed = make(**{group: {**BASE[group], name: other[type(value)](value)}})
        missing = make(**{group: {n: v for n, v in BASE[group].items() if n != name}})
        for problem in (changed, missing):
            assert problem.key() != make().key() and problem.digest() != make().digest(), name
    assert make("other").key() != make().key()


def test_key_is_json_of_the_bucketed_problem():
    assert json.loads(make().key()) == {
        "operation": "op",
        "dims": {"B": 2, "T": 1024, "D": 64},
        "dtypes": BASE["dtypes"],
        "flags": BASE["flags"],
    }


def test_key_is_the_same_in_another_process():
    program = (
        "from ejkernel_eqx.dispatch import Problem\n"
        f"dims, dtypes, flags, lengths = {BASE['dims']}, {BASE['dtypes']}, {BASE['flags']}, {BASE['lengths']}\n"
        "problem = Problem.make('op', dims=dims, dtypes=dtypes, flags=flags, lengths=lengths)\n"
        "print(problem.key()); print(problem.digest())\n"
    )
    source = str(pathlib.Path(ejkernel_eqx.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split("\n")[:2] == [make().key(), make().digest()]


def test_device_facts_of_this_machine():
    facts = device_facts()
    assert facts.backend in (Backend.CPU, Backend.GPU, Backend.TPU) and facts.kind and facts.runtime
    assert facts is device_facts() or facts == device_facts()
    assert hash(facts) == hash(device_facts())


def test_fingerprint_differs_where_a_table_may_not_be_shared():
    h200 = DeviceFacts(
        Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, 232_448, memory=1, runtime="CUDA 13", count=1
    )
    assert h200.slug == "nvidia_h200" and h200.capability == (9, 0)
    assert device_fingerprint(h200).startswith("nvidia_h200-")
    same = dataclasses.replace(h200, memory=2, runtime="CUDA 12", count=8)
    assert device_fingerprint(same) == device_fingerprint(h200)
    for field, value in (
        ("kind", "NVIDIA H100"),
        ("compute_capability", "9.1"),
        ("num_multiprocessors", 66),
        ("shared_memory", 1),
    ):
        assert device_fingerprint(dataclasses.replace(h200, **{field: value})) != device_fingerprint(h200)


@pytest.mark.parametrize(
    "capability, expected", [("9.0", (9, 0)), ("12.1", (12, 1)), ("", (0, 0)), ("gfx942", (0, 0))]
)
def test_capability(capability, expected):
    assert DeviceFacts(Backend.GPU, "x", compute_capability=capability).capability == expected


def test_an_unknown_architecture_gets_the_smallest_limit():
    assert shared_memory_limit("nvidia", "9.0") == 232_448
    assert shared_memory_limit("nvidia", "99.0") == min(
        shared_memory_limit("nvidia", c) for c in ("8.0", "8.6", "9.0", "12.0")
    )
    assert shared_memory_limit("amd", "gfx942") == 65_536


@pytest.mark.parametrize("kind", sorted(_VMEM_MIB))
def test_vector_memory_is_as_jax_knows_it(kind):
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    version = info.chip_version_from_device_kind(kind)
    if version is None:
        pytest.skip("a kind that this JAX does not know yet")
    assert vmem_capacity(kind) == info.get_tpu_info_for_chip(version, 1).vmem_capacity_bytes


def test_the_facts_of_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda platform: 4)
    client = types.SimpleNamespace(platform_version="libtpu")
    device: Any = types.SimpleNamespace(
        platform="tpu", device_kind="TPU v6 lite", client=client, memory_stats=lambda: {"bytes_limit": 7}
    )
    facts = _facts.__wrapped__(device)
    assert (facts.backend, facts.vmem, facts.memory, facts.shared_memory) == (Backend.TPU, 128 * 2**20, 7, 0)
    assert vmem_capacity("TPU v99") == 16 * 2**20
    # Folders of users' tables and the headers of tables stay what they were.
    assert device_fingerprint(facts) == device_fingerprint(dataclasses.replace(facts, vmem=0))
    assert "vmem" not in facts.to_dict() and DeviceFacts.from_dict(facts.to_dict()).vmem == 0
    h200 = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, 232_448)
    assert device_fingerprint(h200) == "nvidia_h200-ab9d6707"
