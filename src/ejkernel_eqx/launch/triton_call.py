"""The launch on a GPU through jax-triton, where `own_call` does not launch. Only this file deals with differences between its versions."""

import contextlib
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from .._errors import not_installed
from ..dispatch import DeviceFacts
from .launch import Launch


@functools.cache
def triton_unavailable() -> str | None:
    """The reason why Triton kernels cannot be launched with the installed software, as a sentence; `None` if they can.

    Devices are not checked: callers must know whether there is a GPU."""
    for package in ("triton", "jax_triton"):
        reason = _import_problem(package)
        if reason is not None:
            return reason
    _fit_to_jax()
    return None


def _import_problem(package: str) -> str | None:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    distribution = package.replace("_", "-")
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return not_installed(distribution) + "."
        return f"{distribution} cannot be imported: {error}."
    # jax-triton raises ImportError without a GPU jaxlib; with an unknown version of Triton, attributes are missing.
    except (ImportError, AttributeError) as error:
        return f"{distribution} does not work with this JAX or Triton: {str(error).strip().split('. ')[0]}."
    finally:
        # jax-triton overwrites or deletes this at import, which it should not.
        if cache_dir is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    return None


def _fit_to_jax() -> None:
    """JAX 0.12 passes three arguments to dead-code rules, the equation last; jax-triton 0.4's takes two and fails under every `jit`."""
    from jax.interpreters import partial_eval
    from jax_triton import triton_lib

    primitive = triton_lib.triton_kernel_call_p
    rule = partial_eval.dce_rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:
        partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def kept_apart(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Keeps the arrays that a launch writes in place apart from all others. It puts a barrier around the arrays of a
    call that aliases them. This costs nothing if their buffers are donated or carried.

    Before the call: XLA merges equal values (two empty caches), and copies them for the call only if they are different operands,
    which the results of a barrier are. On both sides: XLA on GPUs fuses a call with slices that produce an operand or consume
    a result (layers stacked in a scan), and then passes both as if there were no alias."""
    return jax.lax.optimization_barrier(arrays) if arrays else {}


def triton_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Stage the launch; returns the outputs in the kernel's order."""
    reason = triton_unavailable()
    if reason is not None:
        raise RuntimeError(f"The Triton kernel {launch.label} cannot be launched: {reason}")
    import jax_triton

    arrays = arrays | kept_apart({name: arrays[name] for name in launch.aliases})
    operands, named, order = (_arguments_04 if _takes_options() else _arguments_03)(launch, arrays)
    with _aliases_accepted() if launch.aliases else contextlib.nullcontext():
        outputs = jax_triton.triton_call(
            *operands,
            kernel=launch.function,
            grid=launch.grid,  # pyright: ignore[reportArgumentType]
            name=launch.label,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **named,
            **launch.constants,
        )
    by_name = dict(zip(order, outputs, strict=True))
    by_name |= kept_apart({name: by_name[name] for name in launch.aliases.values()})
    return [by_name[name] for name in launch.results]


@contextlib.contextmanager
def _aliases_accepted() -> Iterator[None]:
    """Silences jax-triton 0.4's request for `jax.Ref`s, which a function without effects does not have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        yield


Arguments = tuple[list[Any], dict[str, Any], list[str]]
"""Operands, named arguments, and the order of the outputs."""


def _arguments_03(launch: Launch, arrays: dict[str, jax.Array]) -> Arguments:
    """jax-triton 0.3 takes `out_shape` and `enable_fp_fusion`, counts arrays only, and passes an aliased buffer to the kernel twice:
    as the input and as the output."""
    operands = [arrays[name] if name in arrays else launch.scalars[name] for name in launch.arguments]
    counted = [name for name in launch.arguments if name in arrays]
    order = list(launch.results)
    aliases = {counted.index(source): order.index(result) for source, result in launch.aliases.items()}
    named = {"out_shape": _types(launch, order), "enable_fp_fusion": True}
    return operands, named | ({"input_output_aliases": aliases} if aliases else {}), order


def _arguments_04(launch: Launch, arrays: dict[str, jax.Array]) -> Arguments:
    """jax-triton 0.4 takes `out_type` and options in a mapping, counts all operands, and passes an aliased array as the output's
    parameter; the input's parameter, which no kernel uses, gets a number. The kernel then receives the operands followed by as many
    outputs as it has parameters left, so aliased outputs must be the last ones."""
    given = {**arrays, **launch.scalars, **dict.fromkeys(launch.aliases, 0)}
    operands = [given[name] for name in launch.arguments]
    sources = {result: source for source, result in launch.aliases.items()}
    aliased = [name for name in launch.results if name in sources]
    order = [name for name in launch.results if name not in sources] + aliased
    aliases = {len(operands) + i: order.index(name) for i, name in enumerate(aliased)}
    options = {"enable_fp_fusion": True} | ({"maxnreg": launch.max_registers} if launch.max_registers else {})
    named: dict[str, Any] = {"out_type": _types(launch, order), "backend_options": options}
    named |= {name: arrays[sources[name]] for name in aliased}
    return operands, named | ({"input_output_aliases": aliases} if aliases else {}), order


def _types(launch: Launch, order: list[str]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(launch.outputs[n].shape, launch.outputs[n].dtype) for n in order)


@functools.cache
def _takes_options() -> bool:
    import jax_triton

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


_LIMITS_MEASURED_FOR = (9, 0)  # on an H200


def limits_registers(device: DeviceFacts) -> bool:
    """Returns whether `Launch.max_registers` has an effect on `device`: an NVIDIA GPU, with jax-triton 0.4 or newer."""
    return device.vendor == "nvidia" and triton_unavailable() is None and _takes_options()


def register_limits_measured(device: DeviceFacts) -> bool:
    """Returns whether register limits were measured on the architecture of `device`. Elsewhere they may be tried, but are not a default."""
    return device.vendor == "nvidia" and device.capability == _LIMITS_MEASURED_FOR
