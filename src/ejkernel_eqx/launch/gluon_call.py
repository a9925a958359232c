"""The launch of Gluon kernels, which are written for one architecture: Hopper.

jax-triton 0.4.1 compiles Gluon sources with the passes of Triton's, and launches as many warps as it is told, where a kernel with specialised
warps has more. So Triton compiles these kernels, and the call that jax-triton would stage is staged here, with what the compiled kernel says
of itself. It is jaxlib that launches either."""

import functools
import importlib
import math
import re
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version

from ..dispatch import DeviceFacts
from .compile import compiled, scalar_type_name, TARGETS
from .launch import Launch
from .triton_call import triton_unavailable

_TARGET = "triton_kernel_call_ffi"
_HOPPER = (9, 0)
_TRITON = "3.7"  # Gluon is experimental: other versions may differ


def gluon_unavailable(device: DeviceFacts) -> str | None:
    """Why Gluon kernels cannot be launched on `device` with the installed software, as a clause without its subject; `None` if they can."""
    if device.vendor != "nvidia" or device.capability != _HOPPER:
        return f"needs compute capability 9.0, the device has {device.compute_capability or 'none'}"
    reason = triton_unavailable()
    return _versions_unfit() if reason is None else f"needs Triton and jax-triton: {reason.rstrip('.')}"


@functools.cache
def _versions_unfit() -> str | None:
    """Why not these versions: earlier ones have not been tried."""
    import triton
    from jax_triton import triton_lib

    if not triton.__version__.startswith(_TRITON):
        return f"needs Triton {_TRITON}, not {triton.__version__}"
    if getattr(triton_lib, "CUSTOM_CALL_TARGET_NAME", None) != _TARGET or not hasattr(
        triton_lib.CompilationResult, "global_scratch_size"
    ):
        return "needs jax-triton 0.4.1 or newer"
    installed = jaxlib.version.__version__
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < (0, 11, 1):
        return f"needs JAX 0.11.1 or newer, not {installed}"
    return None


def gluon_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Stage the launch; returns the outputs in the kernel's order."""
    operands = [arrays[name] for name in launch.arguments if name in arrays]
    types = [jax.ShapeDtypeStruct(launch.outputs[n].shape, launch.outputs[n].dtype) for n in launch.results]
    staged = _staged_call(launch)
    call = jax.ffi.ffi_call(_TARGET, [*types, jax.ShapeDtypeStruct((staged.scratch,), jnp.uint8)])
    return list(call(*operands, opaque=staged.opaque))[:-1]


class _Staged(NamedTuple):
    opaque: bytes
    """The call as jaxlib reads it."""
    scratch: int
    """Bytes that all programs together write descriptors to."""


_staged: dict[Any, _Staged] = {}
"""Calls by what they are: a step of training traces each several times."""


def _staged_call(launch: Launch) -> _Staged:
    arrays = tuple((name, x.shape, str(x.dtype)) for name, x in {**launch.inputs, **launch.outputs}.items())
    numbers = (*launch.scalars.items(), *launch.constants.items())
    key = (launch.function, launch.label, launch.grid, launch.num_warps, arrays, numbers)
    if key not in _staged:
        _staged[key] = _stage(launch)
    return _staged[key]


def _stage(launch: Launch) -> _Staged:
    """The kernel, its grid, and a parameter for every argument.

    The last parameter is a kernel's own: where its programs write descriptors. It is a buffer of XLA's here, as one more result. jaxlib would
    allocate one at every launch, which CUDA graphs cannot contain as XLA makes them of several launches."""
    assert not launch.aliases, f"{launch.label}: the outputs of Gluon kernels are new buffers"
    library: Any = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    found = compiled(launch, TARGETS["sm_90"])
    about = found.metadata
    arch = TARGETS["sm_90"].arch
    kernel = library.TritonKernel(about.name, about.num_warps, 1, about.shared, found.asm["ptx"], "", arch)
    parameters = [
        library.create_scalar_parameter(launch.scalars[name], scalar_type_name(launch.scalars[name]))
        if name in launch.scalars
        else library.create_array_parameter(0, 16)
        for name in (*launch.arguments, *launch.results)
        if launch.scalars.get(name) != 1  # a constant of the compiled kernel
    ]
    parameters.append(library.create_array_parameter(0, 128))
    grid = (*launch.grid, 1, 1)[:3]
    call = library.TritonKernelCall(kernel, *grid, parameters).to_proto(launch.label, b"")
    return _Staged(zlib.compress(call), max(about.global_scratch_size * math.prod(grid), 1))
