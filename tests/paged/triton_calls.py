"""Calls of the Triton kernels over pages, interpreted or only recorded: what their tests share."""

import functools
from typing import Any

import pytest

import ejkernel_eqx as ejx
from tests.compiled import executed, launches_of
from tests.paged.cases import Case, make, PagedArrays, PagedSpec, with_leading_axis

pytest.importorskip("triton")
from ejkernel_eqx.paged.triton import compiled, decode_kernel, prefill_kernel, tile_sizes, write_kernel
from ejkernel_eqx.paged.triton.call import folded, PagedTile, TritonConfig
from ejkernel_eqx.paged.triton.tile import FILLED
from ejkernel_eqx.testing import _interpreter as interpreter
from tests.paged import kernels

__all__ = [
    "compiled", "decode_kernel", "FILLED", "folded", "interpreter", "kernels", "prefill_kernel", "tile_sizes", "write_kernel"
]  # fmt: skip

interpret = functools.partial(ejx.launch.run, interpret=True)


def config_of(*sizes: int, **more: Any) -> TritonConfig:
    """One tile for both kernels; what is interpreted has no instructions of one vendor."""
    tile = PagedTile(*sizes)
    given: dict[str, Any] = dict(fast_tanh=False, fast_bytes=False, float32_dot="ieee")
    return TritonConfig(tile, tile, **given | more)


CONFIG = config_of(16, 16, 4, 1, split_k=3, chunk_size=16)


def with_axis(case: Case) -> tuple[PagedArrays, PagedSpec]:
    arrays, spec = make(case)
    return arrays if case.batch else with_leading_axis(arrays), spec


def attend(case: Case, config: TritonConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    """The results, with some arrays changed."""
    return attend_by(case, config, **changes)[0]


def attend_by(case: Case, config: TritonConfig = CONFIG, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Also the constants of the first kernel."""
    arrays, spec = with_axis(case)
    taken = []

    def execute(launch: ejx.launch.Launch, inputs: Any) -> Any:
        taken.append(launch.constants)
        return interpret(launch, inputs)

    return executed(compiled.forward, execute)(arrays._replace(**changes), spec, config), taken[0]


def launches(arrays: PagedArrays, spec: PagedSpec, config: Any) -> dict[str, ejx.launch.Launch]:
    """What a call launches, by the kernel's name; arrays may be shapes."""
    return launches_of(lambda arrays: compiled.forward(arrays, spec, config), arrays)
