"""The launches of Hopper's single pass. It is in Gluon, which is imported when it is first launched."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core import problem_of
from ...spec import SCALAR
from ..shared_gradients import shared_products_kernel
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
    tile, beta = call.config.out, call.arrays.beta
    # With write strengths it was measured to be slower.
    gentle = call.spec.decay == SCALAR and beta is None
    products = _products(call)
    outputs = {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)}
    programs = call.sequences * call.splits * heads * values // tile.block_v
    inputs = edges | {"products": products, "beta": None if beta is None else _by_head(beta)}
    numbers = {"PRODUCTS": products is not None, "NUM_STAGES": tile.num_stages}
    numbers |= {"GENTLE": tile_sizes.GENTLE if gentle else 0.0, "name": "single_kernel"}
    results = call.launch(hopper_single_kernel, tile, outputs, programs, inputs, **numbers)
    return results["out"], results["final"]


def _products(call: Any) -> Array | None:
    """The products of queries and keys of a chunk `[B, T, HQ, chunk]`, masked, where many heads share them and weigh tokens, as in state spaces."""
    heads, queries = call.sizes[0], call.launch.numbers["HQ"]
    if call.spec.decay != SCALAR or call.arrays.beta is None or queries != call.launch.numbers["HK"]:
        return None
    if heads < tile_sizes.LEAST_SHARED * queries or call.chunks * tile_sizes.CHUNK < tile_sizes.LEAST_ROWS:
        return None
    outputs, programs = {"products": call.rows(queries, tile_sizes.CHUNK)}, call.chunks * queries
    numbers = {"GROUPS": queries, "MASKED": True, "name": "masked_products_kernel"}
    tile, kernel = call.config.scores, shared_products_kernel
    return call.launch(kernel, tile, outputs, programs, **numbers)["products"]


def _by_head(beta: Array) -> Array:
    """Write strengths with the tokens of a head side by side, as a program reads them."""
    return jnp.moveaxis(beta.astype(jnp.float32), -1, 0)
