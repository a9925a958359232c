"""The TPU's kernels, interpreted with races detected and memory poisoned, against the reference: few queries, many, and both in one call."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from ejkernel_eqx.paged.pallas.call import PallasConfig
from ejkernel_eqx.paged.pallas.interpreted import platform
from tests.paged.cases import assert_agrees, Case, make, with_leading_axis
from tests.recurrence.quick import quick

CONFIG = PallasConfig(decode_queries=4, decode_keys=16, block_q=16, block_k=16)
forward = quick(platform.forward, static_argnums=(1, 2))
ONE = Case((1, 1, 1, 1), (37, 5, 0, 80), p=16, tail=1)
FEW = Case((3, 1, 0, 2), (33, 16, 9, 70), p=16, first=1, tail=2)
LATENT: dict[str, Any] = dict(K=1, D=32, V=32, rope=16)

CASES = {
    "one query": ONE,
    "one query, every option": dataclasses.replace(
        ONE, left=20, cap=2.0, sinks=True, slopes=True, missing=((0, 2), (3, 0))
    ),
    "few queries": FEW,
    "few queries, every option": dataclasses.replace(
        FEW, left=19, cap=2.0, sinks=True, slopes=True, missing=((0, 1),)
    ),
    "first keys": dataclasses.replace(ONE, kv_start=(3, 0, 0, 40), sinks=True),
    "bfloat16, many key heads": dataclasses.replace(ONE, dtype="bfloat16", H=12, K=6, D=32, V=16),
    "bfloat16, few queries": dataclasses.replace(FEW, dtype="bfloat16", H=4, K=4, left=30),
    "one key head": dataclasses.replace(FEW, K=1, H=6),
    "rows": dataclasses.replace(ONE, batch=2, sinks=True),
    "other pages": dataclasses.replace(ONE, kv_dtype="bfloat16"),
    "latent": dataclasses.replace(FEW, **LATENT),
    "latent, bfloat16": dataclasses.replace(ONE, **LATENT, dtype="bfloat16", left=33),
}
MIXED = Case((20, 1, 0, 33, 3), (52, 9, 4, 150, 70), p=16, first=1, tail=2)
MANY = {
    "mixed": MIXED,
    "mixed, every option": dataclasses.replace(
        MIXED, left=17, cap=2.0, sinks=True, slopes=True, missing=((0, 2), (4, 1)), kv_start=(3, 0, 0, 0, 20)
    ),
    "mixed, bfloat16": dataclasses.replace(MIXED, dtype="bfloat16", H=6, D=32, V=16),
    "mixed, one key head": dataclasses.replace(MIXED, K=1, sinks=True),
    "mixed, four key heads": dataclasses.replace(MIXED, H=4, K=4, left=40),
    "mixed, latent": dataclasses.replace(MIXED, **LATENT, missing=((3, 1),)),
    "mixed, rows": dataclasses.replace(MIXED, batch=2, slopes=True),
    "few tokens": Case((7,), (7,), p=8),
    "small pages": dataclasses.replace(MIXED, p=8, left=40, missing=((3, 2),)),
}
TREES = {
    "bias": dataclasses.replace(FEW, qq_bias=4, slopes=True, tail=0),
    "bias, every option": dataclasses.replace(
        FEW, qq_bias=3, left=19, cap=2.0, sinks=True, batch=2, missing=((0, 1),), K=1, H=3
    ),
}
BYTES: dict[str, Any] = dict(kv_dtype="int8", scales="token")
QUANTISED = {
    "int8": dataclasses.replace(FEW, **BYTES, left=40, missing=((0, 1),)),
    "int8, head scales": dataclasses.replace(FEW, **BYTES | dict(scales="head"), sinks=True),
    "float8, one query": dataclasses.replace(ONE, **BYTES | dict(kv_dtype="float8_e4m3fn"), dtype="bfloat16"),
    "float8 with infinities, one query": dataclasses.replace(
        ONE, **BYTES | dict(kv_dtype="float8_e5m2", scales="head")
    ),
    "int8 values": dataclasses.replace(FEW, v_dtype="int8", scales="token"),
    "latent int8": dataclasses.replace(FEW, **LATENT, kv_dtype="int8", scales="token"),
    "latent, int8 rope, head scales": dataclasses.replace(FEW, **LATENT, v_dtype="int8", scales="head"),
    "mixed, int8": dataclasses.replace(MIXED, **BYTES, missing=((3, 1),), left=30),
    "mixed, float8, head scales": dataclasses.replace(
        MIXED, **BYTES | dict(kv_dtype="float8_e4m3fn", scales="head"), dtype="bfloat16"
    ),
    "mixed, latent int8": dataclasses.replace(MIXED, **LATENT, kv_dtype="int8", scales="token", left=30),
}
CASES |= MANY | TREES | QUANTISED


def attend(case: Case, config: PallasConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    arrays, spec = make(case)
    arrays = arrays if case.batch else with_leading_axis(arrays)
    return forward(arrays._replace(**changes), spec, config)


@pytest.mark.usefixtures("no_races")
@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_agrees(name):
    assert_agrees(CASES[name], attend(CASES[name]))


@pytest.mark.usefixtures("no_races")
@pytest.mark.few(1)
@pytest.mark.parametrize("keys, cores", ((64, 1), (32, 2), (16, 3)))
def test_any_block_and_number_of_cores_agrees(keys, cores):
    config = dataclasses.replace(CONFIG, decode_keys=keys, cores=cores)
    for case in (ONE, FEW):
        assert_agrees(case, attend(case, config))


@pytest.mark.usefixtures("no_races")
def test_the_order_of_pages_changes_nothing():
    arrays, _ = make(ONE)
    assert arrays.v is not None
    count = arrays.k.shape[0]
    order = np.random.default_rng(1).permutation(count)
    place = np.argsort(order)
    table = np.asarray(arrays.page_table)
    there = (table >= 0) & (table < count)
    moved = np.where(there, place[np.clip(table, 0, count - 1)], -1).astype(np.int32)
    first = attend(ONE)
    second = attend(ONE, k=arrays.k[order], v=arrays.v[order], page_table=moved[None])
    assert all(np.array_equal(first[name], second[name]) for name in first)
