"""The launch of Hopper's single pass. It is in Gluon, which is imported when it is first launched."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ....launch import result
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
        edges | {"products": products, "beta": _by_head(call)},
        GENTLE=tile_sizes.GENTLE if _taken_apart(call, products) else 0.0,
        PRODUCTS=products is not None,
        NUM_STAGES=tile.num_stages,
        name="single_kernel",
    )
    return results["out"], results["final"]


def _taken_apart(call: Any, products: Array | None) -> bool:
    """Whether decays are taken apart where they are gentle: with write strengths only where products are given, else registers spill."""
    return call.spec.decay == SCALAR and (call.arrays.beta is None or products is not None)


def _products(call: Any) -> Array | None:
    """The masked products of queries and keys, where enough heads share them that are weighted by token, as in state spaces."""
    numbers, (batch, length) = call.launch.numbers, call.arrays.q.shape[:2]
    heads = numbers["HQ"]
    is_weighted = call.spec.decay == SCALAR and call.arrays.beta is not None
    if not is_weighted or heads != numbers["HK"] or call.sizes[0] < tile_sizes.LEAST_SHARED * heads:
        return None
    results = call.launch(
        masked_products_kernel,
        call.config.scores,
        {"products": result(batch, length, heads, tile_sizes.CHUNK, dtype=call.arrays.q.dtype)},
        call.chunks * heads,
    )
    return results["products"]


def _by_head(call: Any) -> Array | None:
    """Write strengths with the tokens of a head side by side, of which a program reads a chunk at a time."""
    beta = call.arrays.beta
    return None if beta is None else jnp.moveaxis(beta.astype(jnp.float32), -1, 0)
