"""Platform `triton`: the host side. The sliding and the compressed branch are attention over pages; the third branch and the choice have kernels."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from ....core.platforms import kernels_unavailable
from ....dispatch import DeviceFacts, Problem
from ....launch import Execute, LOG2E, result, run
from ....launch.fields import Block, check_fields, Count, Float32Dot, Warps
from ....launch.sizes import cdiv, padded
from ....paged.core import problem_of as pages_problem_of
from ....paged.spec import PagedArrays, PagedSpec
from ....paged.tokens import alone
from ....paged.triton import compiled as pages
from ....paged.triton.call import folded
from ... import branches
from ...spec import NativeArrays
from ...triton import kernels, steps
from ...triton.by_blocks import by_queries
from ...triton.compiled import chosen_by, launcher_of, page_weights, span_for
from ...triton.compiled import unsupported as sparse_unsupported
from ...triton.tiles import ChosenTile, StepTile
from ..spec import most_blocks, PagedNativeArrays, PagedNativeSpec
from ..workload import shapes_of, spec_of

OPAQUE = True
unavailable = kernels_unavailable


@dataclasses.dataclass(frozen=True)
class KeysTile:
    """The weights of `block_k` compressed keys for one query."""

    block_k: Block
    num_warps: Warps
    num_stages: Count

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Kernels of a step of decoding; or those of the selected branch and of its choice, and the configurations of the two branches that are attention
    over pages. In the compressed one each query is a sequence of its own."""

    step: StepTile
    selected: ChosenTile
    weights: KeysTile
    compressed: pages.TritonConfig
    sliding: pages.TritonConfig
    float32_dot: Float32Dot = "tf32x3"

    __post_init__ = check_fields


config_type = TritonConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if reason := sparse_unsupported(problem, device):
        return reason
    return next(filter(None, (pages.unsupported(of, device) for of in _parts(problem))), None)


_ROWS = ((4, 3), (4, 2), (2, 3), (8, 2), (2, 2), (4, 4))
_WEIGHTS = ((64, 4, 1), (128, 4, 1), (32, 2, 1), (64, 2, 1), (128, 8, 1), (16, 1, 1))


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    is_wide = problem.dtype("qkv") == "float32" or device.vendor != "nvidia"
    large = max(padded(problem.dim("D")), padded(problem.dim("V"))) > 128
    dot: dict[str, Any] = {} if device.vendor == "nvidia" else {"float32_dot": "ieee"}
    compressed, sliding = (pages.candidates(of, device) for of in _parts(problem))
    span = span_for(problem.dim("T") * problem.dim("K"), padded(problem.dim("n"), 1), device)
    step_tiles = steps.tiles_for(compressed, _sizes(problem), device)
    found = []
    for n in range(max(map(len, (_ROWS, step_tiles, compressed)))):
        take = lambda of: of[min(n, len(of) - 1)]  # noqa: B023
        (warps, stages), (keys, key_warps, key_stages) = take(_ROWS), take(_WEIGHTS)
        if is_wide or large:
            stages, keys = 1, 32
        tiles = ChosenTile(span, warps, stages), KeysTile(keys, key_warps, key_stages)
        found.append(TritonConfig(take(step_tiles), *tiles, take(compressed), take(sliding), **dot))
    return list(dict.fromkeys(found))


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles. The programs that share the keys of a query depend on the number and length of the sequences."""
    if not config.step.block_k:
        return config
    splits = steps.programs_for(_sizes(problem), config.step.block_k, device)
    return dataclasses.replace(config, step=dataclasses.replace(config.step, split_k=splits))


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """Where few queries go branch by branch."""
    return steps.remark_on(config.step, _sizes(problem))


def _sizes(problem: Problem) -> steps.Sizes:
    size, tokens = problem.dim, problem.dim("M") * problem.dim("p")
    keys, blocks = tokens // int(str(problem.flag("stride"))), cdiv(tokens, int(str(problem.flag("block"))))
    itemsize = jnp.dtype(problem.dtype("qkv")).itemsize
    rows, channels = size("N") * size("Q"), max(size("D"), size("V"))
    return steps.Sizes(size("Q"), rows, size("H"), size("K"), channels, itemsize, keys, blocks)


@functools.lru_cache(maxsize=256)
def _parts(problem: Problem) -> tuple[Problem, Problem]:
    """The problems of the compressed and the sliding branch."""
    arrays, spec = shapes_of(problem), spec_of(problem)
    name, tokens = "ragged_paged_attention", arrays.q.shape[-3]
    # Each query is a sequence.
    names = ("q_start", "q_len", "kv_len", *(("kv_start",) if spec.first_slot else ()))
    each: Any = {n: result(tokens, dtype=jnp.int32) for n in names}
    each["page_table"] = result(tokens, arrays.page_table.shape[-1], dtype=jnp.int32)
    compressed = arrays.compressed._replace(**each)
    return pages_problem_of(name, compressed, _alone(spec)), pages_problem_of(name, arrays.main, spec.sliding)


def _alone(spec: PagedNativeSpec) -> PagedSpec:
    return dataclasses.replace(spec.whole, max_query_len=1)


def forward(
    arrays: PagedNativeArrays, spec: PagedNativeSpec, config: TritonConfig, *, execute: Execute = run
) -> dict[str, Array]:
    """`out [B, T, H, V]` and the blocks that were chosen, for arrays with one leading axis."""
    own, lead = spec.sparse, arrays.q.shape[:2]
    if config.step.block_k:
        step = _step_of(arrays, spec, config, execute)
        if not step.sizes.reason_against():
            found = steps.attend(step, own, config.step, config.float32_dot, execute=execute)
            return {name: x.reshape(*lead, *x.shape[1:]) for name, x in found.items()}
    found = _named("sliding", pages.forward(arrays.main, spec.sliding, config.sliding, execute=execute))
    # From here on without leading axes: the rows' tokens one after the other, each with a table of its own.
    main = alone(folded(arrays.main, spec.sliding, config.sliding, execute).arrays, spec.max_query_len)
    # Pages of either kind may be mapped, so each has its own numbers.
    small = folded(arrays.compressed, spec.whole, config.compressed, execute).arrays
    small = alone(small, spec.max_query_len)
    end = main.kv_len // own.stride
    start = jnp.full_like(end, spec.first_slot) if spec.first_slot else None
    small = small._replace(kv_len=end, kv_start=start)
    results = pages.forward(_with_lead(small), _alone(spec), config.compressed, execute=execute)
    found |= _named("compressed", results)
    launch = _launcher(main, spec, config, execute)
    place = main.kv_len - 1
    if arrays.indices is None:
        indices = _choose(
            launch, small, spec, config.weights, results["lse"][0], place, most_blocks(arrays, spec)
        )
    else:
        indices = arrays.indices.reshape(-1, *arrays.indices.shape[2:])
    selected = by_queries(
        launch.knowing({"indices": indices, "position": place}),
        kernels.page_forward_kernel,
        config.selected,
        (1, *main.q.shape[:2], arrays.v.shape[-1]),
        arrays.k.shape[-2],
        own.count,
        config.selected.span,
    )
    selected = {name: x[0] for name, x in selected.items()}
    found |= _named("selected", {"out": selected["out"], "lse": selected["lse"].T})
    found = {
        name: x.reshape(*lead, *x.shape[x.ndim - (2 if name.endswith("out") else 1) :])
        for name, x in found.items()
    }
    found = {name: x.swapaxes(1, 2) if name.endswith("lse") else x for name, x in found.items()}
    out = branches.combine(arrays.gates, found, arrays.q.dtype)
    return {"out": out, "indices": indices.reshape(*lead, *indices.shape[1:])}


def _step_of(
    arrays: PagedNativeArrays, spec: PagedNativeSpec, config: TritonConfig, execute: Execute
) -> steps.Step:
    """The rows' tokens and sequences one after the other."""
    main = folded(arrays.main, spec.sliding, config.sliding, execute).arrays
    small = folded(arrays.compressed, spec.whole, config.compressed, execute).arrays
    assert main.v is not None and small.v is not None
    flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
    return steps.Step(
        q=main.q,
        gates=arrays.gates.reshape(-1, *arrays.gates.shape[2:]),
        k=main.k,
        v=main.v,
        compressed_k=small.k,
        compressed_v=small.v,
        table=main.page_table,
        small_table=small.page_table,
        queries=spec.max_query_len,
        blocks=most_blocks(arrays, spec),
        first_slot=spec.first_slot,
        q_start=main.q_start,
        q_len=main.q_len,
        kv_len=main.kv_len,
        indices=flat(arrays.indices),
    )


def _named(branch: str, results: dict[str, Array]) -> dict[str, Array]:
    return {f"{branch}_{name}": x for name, x in results.items()}


def _with_lead(arrays: PagedArrays) -> PagedArrays:
    """With a leading axis of one, which pages need not have."""
    return arrays._replace(**{name: x[None] for name, x in arrays.given.items() if name not in ("k", "v")})


def _launcher(main: PagedArrays, spec: PagedNativeSpec, config: TritonConfig, execute: Execute) -> Any:
    """The arguments that the kernels of one call share: those of one row whose keys are those of all pages."""
    assert main.v is not None
    flat = lambda x: x.reshape(1, -1, *x.shape[2:])
    k, v = flat(main.k), flat(main.v)
    arrays = NativeArrays(main.q[None], k, v, k, v, main.q[None])
    launch = launcher_of(arrays, spec.sparse, config.float32_dot, execute, "paged_native_sparse")
    pages, size = main.k.shape[:2]
    return launch.knowing({"table": main.page_table}, M=main.page_table.shape[1], P=pages, PAGE=size)


def _choose(
    launch: Any,
    small: PagedArrays,
    spec: PagedNativeSpec,
    tile: KeysTile,
    lse: Array,
    place: Array,
    blocks: int,
) -> Array:
    """The blocks of each query, `[T, K, n]`."""
    (tokens, _, _), (_, size, heads, _) = small.q.shape, small.k.shape
    keys = small.page_table.shape[1] * size
    start, base = jnp.full((1, tokens), spec.first_slot, jnp.int32), jnp.zeros((1, tokens), jnp.int32)
    tables = {"start": start, "end": small.kv_len[None], "place": place[None], "base": base}
    own = {"k": small.k, "table": small.page_table, "lse": lse.T * LOG2E}
    launch = launch.knowing(own | tables, C=keys, P=small.k.shape[0], PAGE=size)

    weights = lambda chunk, count: page_weights(launch, tile, (heads, keys), chunk, count)
    return chosen_by(weights, launch, (1, tokens, heads, keys, blocks), spec.sparse, 64)[0]
