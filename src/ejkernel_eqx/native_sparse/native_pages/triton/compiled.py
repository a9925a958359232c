"""Platform `triton`: the host side. The sliding and the compressed branch are attention over pages; the third branch and the choice have kernels."""

import dataclasses
import functools
from typing import Any

from jax import Array

from ....core.platforms import Interpreted, kernels_unavailable
from ....dispatch import DeviceFacts, Problem
from ....launch.fields import Block, Checked, Count, Float32Dot, Warps
from ....launch.sizes import padded, rows_of
from ....paged.flat import merged_rows
from ....paged.triton import compiled as pages
from ...triton import few, steps
from ...triton.compiled import span_for
from ...triton.compiled import unsupported as sparse_unsupported
from ...triton.tiles import ChosenTile, StepTile
from ..spec import most_blocks, PagedNativeArrays, PagedNativeSpec, SHARED
from ..workload import shapes_of, spec_of

OPAQUE = True
unavailable = kernels_unavailable


@dataclasses.dataclass(frozen=True)
class KeysTile(Checked):
    """The weights of `block_k` compressed keys for one query."""

    block_k: Block
    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """Kernels of a step of decoding; or those of the selected branch and of its choice, and the configurations of the two branches that are attention
    over pages. In the compressed one each query is a sequence of its own."""

    step: StepTile
    selected: ChosenTile
    weights: KeysTile
    compressed: pages.TritonConfig
    sliding: pages.TritonConfig
    float32_dot: Float32Dot = "tf32x3"


config_type = TritonConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if reason := sparse_unsupported(problem, device):
        return reason
    return next(filter(None, (pages.unsupported(of, device) for of in _parts(problem)[:2])), None)


_ROWS = ((4, 3), (4, 2), (2, 3), (8, 2), (2, 2), (4, 4))
_WEIGHTS = ((64, 4, 1), (128, 4, 1), (32, 2, 1), (64, 2, 1), (128, 8, 1), (16, 1, 1))


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    is_wide = problem.dtype("qkv") == "float32" or device.vendor != "nvidia"
    large = max(padded(problem.dim("D")), padded(problem.dim("V"))) > 128
    dot: dict[str, Any] = {} if device.vendor == "nvidia" else {"float32_dot": "ieee"}
    *parts, step = _parts(problem)
    compressed, sliding = (pages.candidates(of, device) for of in parts)
    span = span_for(problem.dim("T") * problem.dim("K"), padded(problem.dim("n"), 1), device)
    sparing = is_wide or large
    selected = [ChosenTile(span, warps, 1 if sparing else stages) for warps, stages in _ROWS]
    weights = [KeysTile(32 if sparing else keys, warps, stages) for keys, warps, stages in _WEIGHTS]
    columns: list[list[Any]] = [steps.tiles_for(compressed, step, device), selected, weights, compressed]
    rows = rows_of([*columns, sliding])[: max(map(len, columns))]
    return list(dict.fromkeys(TritonConfig(*row, **dot) for row in rows))


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles. The programs that share the keys of a query depend on the number and length of the sequences."""
    if not config.step.block_k:
        return config
    splits = steps.programs_for(_parts(problem)[-1], config.step.block_k, device)
    return dataclasses.replace(config, step=dataclasses.replace(config.step, split_k=splits))


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """Returns where few queries go branch by branch."""
    return steps.remark_on(config.step, _parts(problem)[-1])


@functools.lru_cache(maxsize=256)
def _parts(problem: Problem) -> tuple[Problem, Problem, steps.Step]:
    """The problems of the compressed and the sliding branch, and the shapes of a step."""
    spec, shapes = spec_of(problem), shapes_of(problem)
    row = lambda arrays: arrays._replace(**{n: x[None] for n, x in arrays.given.items() if n not in SHARED})
    return few.parts_of(lambda arrays: _step_of(row(arrays), spec), shapes, spec.sparse)


def forward(arrays: PagedNativeArrays, spec: PagedNativeSpec, config: TritonConfig) -> dict[str, Array]:
    """`out [B, T, H, V]` and the blocks that were chosen, for arrays with one leading axis."""
    return few.attend(_step_of(arrays, spec), spec.sparse, config, arrays.q.shape[:2])


def _step_of(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> steps.Step:
    """The rows' tokens and sequences one after the other. Pages of either kind may be mapped, so each has its own numbers."""
    main, _ = merged_rows(arrays.main, spec.sliding, in_parts=False)
    small, _ = merged_rows(arrays.compressed, spec.whole, in_parts=False)
    assert main.v is not None and small.v is not None
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    return steps.Step(
        q=main.q, gates=flat(arrays.gates), k=main.k, v=main.v, compressed_k=small.k, compressed_v=small.v, table=main.page_table,
        small_table=small.page_table, q_start=main.q_start, q_len=main.q_len, kv_len=main.kv_len, queries=spec.max_query_len,
        blocks=most_blocks(arrays, spec), first_slot=spec.first_slot, indices=None if arrays.indices is None else flat(arrays.indices),
    )  # fmt: skip


_PAGES = pages.interpreted.config
_SMALL = TritonConfig(StepTile(16, 3, 4, 1), ChosenTile(2, 4, 1), KeysTile(16, 4, 1), _PAGES, _PAGES)
interpreted = Interpreted(__name__, _SMALL, float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
