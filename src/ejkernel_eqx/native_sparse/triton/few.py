"""Few queries over many keys, and all queries over pages: a step of decoding, or branch by branch.

Branch by branch, the compressed and the sliding branch are attention over pages, whose kernels split the keys of a query over programs. In the
compressed one, and where there are few queries in both, each query is a sequence of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...dispatch import Problem
from ...launch import Launcher, LOG2E
from ...launch.sizes import padded
from ...paged.core import problem_of
from ...paged.spec import PagedArrays, PagedSpec
from ...paged.tokens import alone
from ...paged.triton import compiled as pages
from .. import branches
from ..spec import NativeSpec
from . import kernels, steps
from .by_blocks import by_queries
from .choice import chosen_by
from .steps import Step
from .tiles import StepTile


class Tiles(NamedTuple):
    """The configuration of a call: of a step; or of the selected branch, of the weights of compressed keys, and of two branches over pages."""

    step: StepTile
    selected: Any
    weights: Any
    compressed: pages.TritonConfig
    sliding: pages.TritonConfig
    float32_dot: str


def attend(step: Step, spec: NativeSpec, tiles: Any, lead: Any, save: bool = False) -> Named:
    """`out [*lead, H, V]` and the chosen blocks; with `save` also the results of all branches, for a gradient. `lead` are the rows and their
    tokens."""
    # The kernels of a step keep no results of single branches, which a gradient needs.
    if tiles.step.block_k and not (save or step.reason_against()):
        found = steps.attend(step, spec, tiles.step, tiles.float32_dot)
        return {name: x.reshape(*lead, *x.shape[1:]) for name, x in found.items()}
    found = _by_branch(step, spec, tiles)
    found = {name: x.reshape(*lead, *x.shape[1:]) for name, x in found.items()}
    found = {name: x.swapaxes(1, 2) if name.endswith("lse") else x for name, x in found.items()}
    indices = found.pop("indices")
    out = branches.combine(step.gates.reshape(*lead, *step.gates.shape[1:]), found, step.q.dtype)
    return {"out": out, "indices": indices} | (found if save else {})


def parts_of(step_of: Callable[[Any], Step], shapes: Any, spec: NativeSpec) -> tuple[Problem, Problem, Step]:
    """The problems of the compressed and the sliding branch, and the shapes of a step, from those of a call."""
    problems: list[Problem] = []

    def look(step: Step) -> None:
        problems.extend(problem_of("ragged_paged_attention", *call) for call in _calls(step, spec).values())

    # Only shapes are needed, so nothing is computed.
    step = jax.eval_shape(step_of, shapes)
    jax.eval_shape(look, step)
    return problems[0], problems[1], step


def _calls(step: Step, spec: NativeSpec) -> dict[str, tuple[PagedArrays, PagedSpec]]:
    """The compressed and the sliding branch as attention over pages."""
    each, small = alone(step.main, step.queries), alone(step.small, step.queries)
    room = lambda arrays: arrays.page_table.shape[1] * arrays.k.shape[1]
    end = step.first_slot + jnp.maximum(each.kv_len // spec.stride - (spec.span // spec.stride - 1), 0)
    start = jnp.full_like(end, step.first_slot) if step.first_slot else None
    small = small._replace(kv_len=jnp.minimum(end, room(small)), kv_start=start)
    alike = PagedSpec(spec.scale, return_lse=True)
    near, window = each._replace(kv_len=jnp.clip(each.kv_len, 0, room(each))), {"left": spec.window - 1}
    # With many queries, tiles share the keys of the window, so sequences stay whole.
    if step.queries > steps.MOST_QUERIES:
        near, window = step.main, window | {"max_query_len": step.queries}
    return {"compressed": (small, alike), "sliding": (near, dataclasses.replace(alike, **window))}


def _by_branch(step: Step, spec: NativeSpec, tiles: Any) -> Named:
    """`out [T, H, V]` and `lse [T, H]` of each branch, and the blocks `indices [T, K, n]`."""
    found, calls = {}, _calls(step, spec)
    for name, (arrays, own) in calls.items():
        # With a leading axis of one, which pages need not have.
        row = arrays._replace(**{n: x[None] for n, x in arrays.given.items() if n not in ("k", "v")})
        results = pages.forward(row, own, getattr(tiles, name))
        found |= {f"{name}_{what}": x[0] for what, x in results.items()}
    each, small = alone(step.main, step.queries), calls["compressed"][0]
    place, numbers = each.kv_len - 1, steps.numbers_of(step.q, step.v, spec, tiles.float32_dot)
    named = {"q": step.q, "k": step.k, "v": step.v, "position": place, "table": each.page_table}
    numbers |= {"T": step.q.shape[0], "BLOCK_S": padded(spec.block)} | _sizes(each)
    launch = Launcher("paged_native_sparse", named, numbers, step.q)
    indices = step.indices
    if indices is None:
        indices = _chosen(launch, step, small, spec, tiles.weights, place, found["compressed_lse"])
    launch, shape = launch.knowing({"indices": indices}), (1, *step.q.shape[:2], step.v.shape[-1])
    selected = by_queries(launch, kernels.page_forward_kernel, tiles.selected, shape)
    found |= {"selected_out": selected["out"][0], "selected_lse": selected["lse"][0].T}
    return found | {"indices": indices}


def _sizes(arrays: PagedArrays) -> dict[str, int]:
    """Returns what kernels know of pages."""
    (count, size), tables = arrays.k.shape[:2], arrays.page_table.shape[1]
    return {"M": tables, "P": count, "PAGE": size}


def _chosen(
    launch: Launcher, step: Step, small: PagedArrays, spec: NativeSpec, tile: Any, place: Array, lse: Array
) -> Array:
    """The blocks of each query, `[T, K, n]`; `lse [T, H]` is that of the compressed branch."""
    tokens, heads = step.q.shape[0], step.k.shape[2]
    sizes = _sizes(small)
    keys = sizes["M"] * sizes["PAGE"]
    row = lambda number: jnp.full((1, tokens), number, jnp.int32)
    tables = {"start": row(step.first_slot), "end": small.kv_len[None], "place": place[None], "base": row(0)}
    own = {"k": small.k, "table": small.page_table, "lse": lse.T * LOG2E}
    launch = launch.knowing(own | tables, C=keys, **sizes)
    whole = 1, tokens, heads, keys, step.blocks
    return chosen_by(kernels.page_importance_kernel, tile, launch, whole, spec, 1)[0]
