"""The launch on a GPU through jax-triton. This file alone knows how its versions differ."""

import contextlib
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from .._optional import not_installed
from ..dispatch import DeviceFacts
from .launch import Launch


@functools.cache
def triton_unavailable() -> str | None:
    """Why Triton kernels cannot be launched with the software installed here, as a sentence; `None` if they can.

    This says nothing about devices: whether there is a GPU is for the caller to know."""
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
    # jax-triton asks for a GPU jaxlib by ImportError; with a Triton it does not know, attributes are missing.
    except (ImportError, AttributeError) as error:
        return f"{distribution} does not work with this JAX or Triton: {str(error).strip().split('. ')[0]}."
    finally:
        # jax-triton overwrites or deletes this at import; it is not its to change.
        if cache_dir is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    return None


def _fit_to_jax() -> None:
    """JAX 0.12 hands a rule for dead code three arguments, the equation last; jax-triton 0.4's takes two and fails under every `jit`."""
    from jax.interpreters import partial_eval
    from jax_triton import triton_lib

    primitive = triton_lib.triton_kernel_call_p
    rule = partial_eval.dce_rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:
        partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def triton_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Stage the launch; the outputs come in the kernel's order."""
    reason = triton_unavailable()
    if reason is not None:
        raise RuntimeError(f"The Triton kernel {launch.label} cannot be launched: {reason}")
    import jax_triton

    arrays = arrays | _kept_apart({name: arrays[name] for name in launch.aliases})
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
    by_name |= _kept_apart({name: by_name[name] for name in launch.aliases.values()})
    return [by_name[name] for name in launch.results]


def _kept_apart(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays behind one barrier, on either side of a call that aliases them, at no cost where their buffers are donated or carried.

    Before the call: XLA makes one value of equal ones (two empty caches), and copies it for the call only if they are different operands,
    which the results of one barrier remain. On both sides: XLA on GPUs fuses a call with the slice that an operand is and the slice that
    a result becomes (layers stacked in a scan), and then hands over the two as if there were no alias."""
    return jax.lax.optimization_barrier(arrays) if arrays else {}


@contextlib.contextmanager
def _aliases_accepted() -> Iterator[None]:
    """jax-triton 0.4 would rather be given `jax.Ref`s, which a function without effects has not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        yield


Arguments = tuple[list[Any], dict[str, Any], list[str]]
"""Operands, named arguments, and the order in which the outputs come."""


def _arguments_03(launch: Launch, arrays: dict[str, jax.Array]) -> Arguments:
    """jax-triton 0.3 takes `out_shape` and `enable_fp_fusion`, counts arrays only, and hands an aliased buffer to the kernel twice:
    as the input and as the output."""
    operands = [arrays[name] if name in arrays else launch.scalars[name] for name in launch.arguments]
    counted = [name for name in launch.arguments if name in arrays]
    order = list(launch.results)
    aliases = {counted.index(source): order.index(result) for source, result in launch.aliases.items()}
    named = {"out_shape": _types(launch, order), "enable_fp_fusion": True}
    return operands, named | ({"input_output_aliases": aliases} if aliases else {}), order


def _arguments_04(launch: Launch, arrays: dict[str, jax.Array]) -> Arguments:
    """jax-triton 0.4 takes `out_type` and options in a mapping, counts all operands, and has an output's parameter take an aliased array
    itself; the input's, which no kernel uses, gets a number. The kernel is then handed the operands and after them the outputs, as many
    as it still has parameters for: those that are aliased must be the last ones."""
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
    """Whether `Launch.max_registers` has an effect on `device`: one of NVIDIA's, with the jax-triton installed (0.4 and newer)."""
    return device.vendor == "nvidia" and triton_unavailable() is None and _takes_options()


def register_limits_measured(device: DeviceFacts) -> bool:
    """Whether limits on registers were measured on the architecture of `device`. Elsewhere they may be tried, but are no default."""
    return device.vendor == "nvidia" and device.capability == _LIMITS_MEASURED_FOR
