"""The launch on a GPU through jax-triton. This file alone knows how its versions differ."""

import functools
import importlib
import inspect
import os
from typing import Any

import jax

from .launch import Launch


@functools.cache
def triton_unavailable() -> str | None:
    """Why Triton kernels cannot be launched with the software installed here, as a sentence; `None` if they can.

    This says nothing about devices: whether there is a GPU is for the caller to know."""
    for package in ("triton", "jax_triton"):
        reason = _import_problem(package)
        if reason is not None:
            return reason
    return None


def _import_problem(package: str) -> str | None:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    distribution = package.replace("_", "-")
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"{distribution} is not installed."
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


def triton_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Stage the launch; the outputs come in the kernel's order."""
    reason = triton_unavailable()
    if reason is not None:
        raise RuntimeError(f"The Triton kernel {launch.label} cannot be launched: {reason}")
    import jax_triton

    operands = [arrays[name] if name in arrays else launch.scalars[name] for name in launch.arguments]
    out_types = tuple(
        jax.ShapeDtypeStruct(launch.outputs[name].shape, launch.outputs[name].dtype)
        for name in launch.results
    )
    outputs = jax_triton.triton_call(
        *operands,
        kernel=launch.function,
        grid=launch.grid,  # pyright: ignore[reportArgumentType]
        name=launch.label,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **_versioned_arguments(launch, out_types),
        **launch.constants,
    )
    return list(outputs)


def _versioned_arguments(launch: Launch, out_types: tuple) -> dict[str, Any]:
    """jax-triton 0.3 takes `out_shape` and `enable_fp_fusion`; 0.4 takes `out_type` and options in a mapping."""
    if not _takes_options():
        return {"out_shape": out_types, "enable_fp_fusion": True}
    options = {"enable_fp_fusion": True} | ({"maxnreg": launch.max_registers} if launch.max_registers else {})
    return {"out_type": out_types, "backend_options": options}


@functools.cache
def _takes_options() -> bool:
    import jax_triton

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


def limits_registers() -> bool:
    """Whether `Launch.max_registers` has an effect with the jax-triton installed (0.4 and newer)."""
    return triton_unavailable() is None and _takes_options()
