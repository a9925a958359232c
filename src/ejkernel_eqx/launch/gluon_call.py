"""The launch of Gluon kernels, which are written for one architecture: Hopper.

jax-triton 0.4.1 compiles Gluon sources with the passes of Triton's, and launches as many warps as it is told, where a kernel with specialised
warps has more. So Triton compiles these kernels, and the call that jax-triton would stage is staged here, with what the compiled kernel says
of itself. It is jaxlib that launches either."""

import functools
import zlib

import jax
import jaxlib

from ..dispatch import DeviceFacts
from .compile import compiled, scalar_type_name, TARGETS
from .launch import Launch
from .triton_call import triton_unavailable

_TARGET = "triton_kernel_call_ffi"
_HOPPER = (9, 0)


def gluon_unavailable(device: DeviceFacts) -> str | None:
    """Why Gluon kernels cannot be launched on `device` with the installed software, as a clause; `None` if they can."""
    if device.vendor != "nvidia" or device.capability != _HOPPER:
        return f"Gluon kernels need compute capability 9.0, the device has {device.compute_capability or 'none'}"
    return triton_unavailable() or _versions_unfit()


@functools.cache
def _versions_unfit() -> str | None:
    """Kernels that make their own descriptors need a scratch buffer, which jaxlib's calls have from 0.11.1 on."""
    from jax_triton import triton_lib

    if getattr(triton_lib, "CUSTOM_CALL_TARGET_NAME", None) != _TARGET or not hasattr(
        triton_lib.CompilationResult, "global_scratch_size"
    ):
        return "Gluon kernels need jax-triton 0.4.1 or newer"
    if tuple(map(int, jaxlib.__version__.split(".")[:3])) < (0, 11, 1):
        return f"Gluon kernels need JAX 0.11.1 or newer, not {jaxlib.__version__}"
    return None


def gluon_call(launch: Launch, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Stage the launch; returns the outputs in the kernel's order."""
    operands = [arrays[name] for name in launch.arguments if name in arrays]
    types = [jax.ShapeDtypeStruct(launch.outputs[n].shape, launch.outputs[n].dtype) for n in launch.results]
    call = jax.ffi.ffi_call(_TARGET, types)
    return list(call(*operands, opaque=zlib.compress(_call_of(launch))))


def _call_of(launch: Launch) -> bytes:
    """The call as jaxlib reads it: the kernel, its grid, and a parameter for every argument."""
    from jax_triton.triton_lib import triton_kernel_call_lib as library

    found = compiled(launch, TARGETS["sm_90"])
    about = found.metadata
    arch = TARGETS["sm_90"].arch
    scratch = (about.global_scratch_size, about.global_scratch_align) if about.global_scratch_size else ()
    kernel = library.TritonKernel(
        about.name, about.num_warps, 1, about.shared, found.asm["ptx"], "", arch, *scratch
    )
    parameters = [
        library.create_scalar_parameter(launch.scalars[name], scalar_type_name(launch.scalars[name]))
        if name in launch.scalars
        else library.create_array_parameter(0, 16)
        for name in (*launch.arguments, *launch.results)
        if launch.scalars.get(name) != 1  # a constant of the compiled kernel
    ]
    grid = (*launch.grid, 1, 1)[:3]
    return library.TritonKernelCall(kernel, *grid, parameters).to_proto(launch.label, b"")
