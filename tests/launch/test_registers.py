"""Limits on registers: found on an H200, so they are no default of devices of another architecture."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from ejkernel_eqx.attention.example import example_problem as attention_problem
from ejkernel_eqx.launch import limits_registers, triton_call
from ejkernel_eqx.paged.example import example_problem as paged_problem
from ejkernel_eqx.selective_scan.example import example_problem as scan_problem
from tests.compiled import DEVICES

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as attention
from ejkernel_eqx.paged.triton import compiled as paged
from ejkernel_eqx.selective_scan.triton import compiled as scan

PAGES = {"N": 64, "H": 32, "K": 8, "D": 128, "S": 4096}
CASES = {
    "attention": (
        attention,
        attention_problem(
            "flash_attention",
            {"T": 4096, "H": 16, "D": 128},
            "bfloat16",
            {"causal": False, "alibi_slopes": True},
        ),
    ),
    "pages": (paged, paged_problem("unified_attention", PAGES | {"T": 4096}, "bfloat16", {})),
    "pages of bytes": (
        paged,
        paged_problem("paged_attention", PAGES, "bfloat16", {"kv": "int8", "scales": "token"}),
    ),
    "selective scan": (scan, scan_problem("state_space_v1", {"T": 4096, "I": 2048, "B": 4}, "bfloat16", {})),
}
OTHERS = ("sm_80", "sm_100", "gfx942")


@pytest.fixture(autouse=True)
def jax_triton_limits_registers(monkeypatch):
    monkeypatch.setattr(triton_call, "triton_unavailable", lambda: None)
    monkeypatch.setattr(triton_call, "_takes_options", lambda: True)


def limits_of(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            yield from limits_of(value)
        elif name.endswith("_registers"):
            yield value


MEASURED = {
    "attention": {0, 128},
    "pages": {0, 128},
    "pages of bytes": {128, 168},
    "selective scan": {0, 168},
}


@pytest.mark.parametrize("case", CASES)
def test_limits_are_defaults_where_they_were_measured_and_timed_where_they_have_an_effect(case):
    module, problem = CASES[case]
    assert set(limits_of(module.default_config(problem, DEVICES["sm_90"]))) == MEASURED[case]
    for target in OTHERS:
        assert set(limits_of(module.default_config(problem, DEVICES[target]))) == {0}
        configs = module.candidates(problem, DEVICES[target])
        limits = {limit for config in configs for limit in limits_of(config)}
        assert limits_registers(DEVICES[target]) == (limits != {0}) == (target != "gfx942")
