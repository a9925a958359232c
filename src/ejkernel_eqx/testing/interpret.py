"""Running a Triton kernel on a CPU, by interpretation, from JAX.

This needs neither a GPU, torch nor `TRITON_INTERPRET`. Kernels remain ordinary `JITFunction`s, which the same process
can also compile. See `_interpreter.py` for how it works and what it checks.
"""

from collections.abc import Mapping

import jax
import jax.core
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..launch import Launch
from ..launch._language_lock import language_lock
from ._interpreter import run_grid
from ._numpy_builder import poison as poison


class InterpretError(RuntimeError):
    """An interpreted kernel failed; the message names the kernel, the program in the grid and the reason."""


def interpret(launch: Launch, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Interpret the launch on numpy arrays; returns the outputs in the kernel's order.

    Inputs are read-only to the kernel, and copied if an output is aliased to them. Out-of-bounds memory accesses raise `InterpretError`.
    """
    inputs = {name: np.ascontiguousarray(np.asarray(array)) for name, array in arrays.items()}
    started = {result: np.array(inputs[source]) for source, result in launch.aliases.items()}
    # An aliased input exists only as its output.
    inputs |= {name: np.empty(0, inputs[name].dtype) for name in launch.aliases}
    outputs = {}
    for name in launch.results:
        out = launch.outputs[name]
        outputs[name] = started.get(name, np.full(out.shape, poison(out.dtype), out.dtype))
    with language_lock:
        try:
            run_grid(launch.function, inputs, outputs, launch.scalars, launch.constants, launch.grid)
        # A kernel body is arbitrary code and may raise anything; the error must report the location in the grid.
        except Exception as error:
            where = getattr(error, "triton_program", None)
            raise InterpretError(
                f"{launch.label}, program {where} of grid {launch.grid}: {type(error).__name__}: {error}"
            ) from error
    return tuple(outputs.values())


# `jax.pure_callback` would pass JAX arrays to the callback, and reading a large one waits for a copy on the same thread
# pool that the callbacks of several devices occupy: a deadlock. Plain numpy arrays avoid it.
interpret_p = Primitive("ejkernel_interpret")
interpret_p.multiple_results = True


def interpret_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """`interpret` as a JAX operation: immediate on concrete arrays, else a callback in the computation."""

    def host(*values):
        return interpret(launch, dict(zip(arrays, values)))

    out_types = tuple(
        jax.ShapeDtypeStruct(launch.outputs[name].shape, launch.outputs[name].dtype)
        for name in launch.results
    )
    return interpret_p.bind(*arrays.values(), host=host, out_types=out_types)


@interpret_p.def_impl
def _interpret_now(*arrays, host, out_types):
    return [*jax.device_put(host(*map(np.asarray, arrays)))]


@interpret_p.def_abstract_eval
def _interpret_types(*avals, host, out_types):
    return [jax.core.ShapedArray(out.shape, np.dtype(out.dtype)) for out in out_types]


def _interpret_lowering(ctx, *operands, host, out_types):
    types = ctx.avals_in, ctx.avals_out
    results, _, _ = mlir.emit_python_callback(
        ctx, host, None, list(operands), *types, has_side_effect=False, returns_token=False
    )
    return results


mlir.register_lowering(interpret_p, _interpret_lowering, cacheable=False)


def _no_vmap(*_, **__):
    raise NotImplementedError(
        "An interpreted launch has no vmap rule, like a launch on a device; fold the batch beforehand with `custom_vmap`."
    )


batching.primitive_batchers[interpret_p] = _no_vmap
