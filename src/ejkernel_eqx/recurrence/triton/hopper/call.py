"""The launches of Hopper's kernels. They are in Gluon, which is imported when one is first launched."""

import math
from typing import Any

from jax import Array

from ....launch import Options, result
from ...core import problem_of
from ...spec import SCALAR
from ..shared_gradients import masked_products_kernel
from . import tile_sizes


def single(call: Any, edges: dict[str, Array]) -> tuple[Array, Array]:
    """Outputs and final state, as `Call.single`.

    **Raises:** `ValueError` if the configuration has this kernel for a call that it cannot run.
    """
    reason = tile_sizes.config_unfit(call.config, problem_of("recurrence", call.arrays, call.spec))
    if reason is not None:
        raise ValueError(f"config: expected hopper=False in out, received True: Hopper's kernel {reason}.")
    from .single_kernel import hopper_single_kernel

    heads, _, values = call.sizes
    tile = call.config.out
    products = _products(call)
    results = call.launch(
        hopper_single_kernel,
        tile,
        {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)},
        call.sequences * call.splits * heads * values // tile.block_v,
        edges | {"products": products},
        PRODUCTS=products is not None,
        NUM_STAGES=tile.num_stages,
        name="single_kernel",
    )
    return results["out"], results["final"]


def _products(call: Any) -> Array | None:
    """The masked products of queries and keys, where enough heads share them."""
    numbers, (batch, length) = call.launch.numbers, call.arrays.q.shape[:2]
    heads = numbers["HQ"]
    weighed = call.spec.decay == SCALAR or call.arrays.beta is not None
    if not weighed or heads != numbers["HK"] or call.sizes[0] < tile_sizes.LEAST_SHARED * heads:
        return None
    results = call.launch(
        masked_products_kernel,
        call.config.scores,
        {"products": result(batch, length, heads, tile_sizes.CHUNK, dtype=call.arrays.q.dtype)},
        call.chunks * heads,
    )
    return results["products"]


def local(call: Any, dout: Array | None, passed: dict[str, Array], shape: Any) -> Array:
    """What each piece of a split adds, as `splits` finds it, in the given shape; for calls that `single` can run."""
    from .local_kernel import hopper_local_kernel

    numbers = call.launch.numbers
    heads, _, values = call.sizes
    x, y = ("k", "v") if dout is None else ("q", "do")
    operands = {"q": call.arrays.q, "k": call.arrays.k, "v": call.arrays.v, "do": dout}
    results = call.launch(
        hopper_local_kernel,
        Options(4, 1, tile_sizes.LOCAL_REGISTERS),
        {"local": shape},
        math.prod(shape.shape[:4]) * values // tile_sizes.WIDTH,
        {"x": operands[x], "y": operands[y], **passed},
        name="local_states_kernel" if dout is None else "local_dstates_kernel",
        HX=numbers["HK"] if dout is None else numbers["HQ"],
        HY=numbers["HV"] if dout is None else heads,
        NUM_STAGES=tile_sizes.LOCAL_STAGES,
    )
    return results["local"]
