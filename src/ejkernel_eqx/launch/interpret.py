"""Running a Triton kernel on a CPU, by interpretation, from JAX.

Nothing here needs a GPU, torch or `TRITON_INTERPRET`; kernels stay ordinary `JITFunction`s, which the same process
can also compile. See `_interpreter.py` for how, and for what is checked on the way.
"""

import functools
import importlib.util
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ._language_lock import language_lock
from .launch import Launch


class InterpretError(RuntimeError):
    """An interpreted kernel failed; the message names the kernel, the program in the grid and the reason."""


@functools.cache
def interpreter_unavailable() -> str | None:
    """Why kernels cannot be interpreted here, as a sentence; `None` if they can. Only Triton is needed."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed."
    return None


def poison(dtype) -> np.generic:
    """What an output holds before the kernel writes it: NaN, the largest integer, or True."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.type("nan")
    if dtype == np.bool_:
        return np.bool_(True)
    return dtype.type(jnp.iinfo(dtype).max)


def interpret(launch: Launch, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Interpret the launch on numpy arrays; the outputs come in the kernel's order.

    Inputs are read-only to the kernel. Memory accesses outside an array raise `InterpretError`.
    """
    reason = interpreter_unavailable()
    if reason is not None:
        raise RuntimeError(f"The Triton kernel {launch.label} cannot be interpreted: {reason}")
    from ._interpreter import run_grid

    outputs = {}
    for name in launch.results:
        out = launch.outputs[name]
        outputs[name] = np.full(out.shape, poison(out.dtype), out.dtype)
    inputs = {name: np.ascontiguousarray(np.asarray(array)) for name, array in arrays.items()}
    with language_lock:
        try:
            run_grid(launch.function, inputs, outputs, launch.scalars, launch.constants, launch.grid)
        # Whatever a kernel's body may raise: it is arbitrary code, and the place in the grid has to be told.
        except Exception as error:
            where = getattr(error, "triton_program", None)
            raise InterpretError(
                f"{launch.label}, program {where} of grid {launch.grid}: {type(error).__name__}: {error}"
            ) from error
    return tuple(outputs.values())


def interpret_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """`interpret` as a JAX operation: immediately on concrete arrays, else as a callback in the computation."""

    def host(*values):
        return interpret(launch, dict(zip(arrays, values)))

    if not any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return [jnp.asarray(out) for out in host(*arrays.values())]
    out_types = tuple(
        jax.ShapeDtypeStruct(launch.outputs[name].shape, launch.outputs[name].dtype) for name in launch.results
    )
    # No vmap_method: batches are folded by the caller, as for the real launch, and never looped over unseen.
    return list(jax.pure_callback(host, out_types, *arrays.values()))
