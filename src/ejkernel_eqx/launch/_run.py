"""`run`, which performs a `Launch` on a GPU or interprets it, as a JAX operation."""

import importlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..parallel import match_varying
from .compile import TARGETS
from .launch import Launch
from .own_call import own_call, own_target
from .triton_call import triton_call


def run(launch: Launch, arrays: Mapping[str, jax.Array], *, interpret: bool = False) -> dict[str, jax.Array]:
    """Launch the kernel on `arrays` and return its outputs by name.

    **Arguments:**

    - `launch`: the description of the launch.
    - `arrays`: one array per entry of `launch.inputs`. For an optional input that the constants disable, any array that
        matches `launch.inputs` will do.
    - `interpret`: run the same kernel on the CPU, slowly, with checked memory accesses. Outputs are then initialised with
        `poison` values, which reveals elements that the kernel does not write.

    **Returns:** a dictionary from output names to arrays. An empty launch returns zeros, and aliased arrays unchanged. Inside `jax.shard_map`
    the outputs vary over all mesh axes that any input varies over.

    There is no `vmap` or autodiff rule here: callers fold batches and define derivatives (`core/kind.py`).
    """
    checked = _checked_arrays(launch, arrays)
    if interpret and launch.is_gluon:
        raise ValueError(
            f"run of {launch.label}: a kernel in Gluon cannot be interpreted; use a configuration without Hopper's kernels."
        )
    if launch.is_empty:
        given = {result: checked[source] for source, result in launch.aliases.items()}
        outputs = [
            given[name]
            if name in given
            else jnp.zeros(launch.outputs[name].shape, launch.outputs[name].dtype)
            for name in launch.results
        ]
    elif interpret:
        # It imports this package, and is of no use to those who launch.
        outputs = importlib.import_module("ejkernel_eqx.testing.interpret").interpret_call(launch, checked)
    elif launch.is_gluon:
        outputs = own_call(launch, checked, TARGETS["sm_90"])
    elif (target := own_target()) is not None:
        outputs = own_call(launch, checked, target)
    else:
        outputs = triton_call(launch, checked)
    return match_varying(dict(zip(launch.results, outputs, strict=True)), list(checked.values()))


def _checked_arrays(launch: Launch, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    if arrays.keys() != launch.inputs.keys():
        raise ValueError(
            f"run of {launch.label}: expected the arrays {sorted(launch.inputs)}, got {sorted(arrays)}."
        )
    checked = {name: jnp.asarray(arrays[name]) for name in launch.arguments if name in arrays}
    for name, array in checked.items():
        expected = launch.inputs[name]
        if array.shape != tuple(expected.shape) or array.dtype != expected.dtype:
            raise ValueError(
                f"run of {launch.label}: {name!r} must have shape {tuple(expected.shape)} and dtype "
                f"{expected.dtype}, got {array.shape} and {array.dtype}."
            )
    return checked
