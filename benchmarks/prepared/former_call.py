"""The launch of Hopper's single pass. It is in Gluon, which is imported when it is first launched."""

from typing import Any

from jax import Array

from ...core import problem_of
from ...spec import SCALAR
from . import tile_sizes


def single(call: Any, edges: dict[str, Array]) -> tuple[Array, Array]:
    """Outputs and final state, as `Call.single`.

    **Raises:** `ValueError` if the configuration has this kernel for a call that it cannot run.
    """
    reason = tile_sizes.config_unfit(call.config, problem_of("recurrence", call.arrays, call.spec))
    if reason is not None:
        raise ValueError(f"config: expected hopper=False in out, received True: Hopper's kernel {reason}.")
    from .former_single_kernel import hopper_single_kernel

    heads, _, values = call.sizes
    tile = call.config.out
    # With write strengths it was measured to be slower.
    gentle = call.spec.decay == SCALAR and call.arrays.beta is None
    results = call.launch(
        hopper_single_kernel,
        tile,
        {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)},
        call.sequences * call.splits * heads * values // tile.block_v,
        edges,
        GENTLE=tile_sizes.GENTLE if gentle else 0.0,
        NUM_STAGES=tile.num_stages,
        name="single_kernel",
    )
    return results["out"], results["final"]
