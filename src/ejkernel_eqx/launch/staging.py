"""What jaxlib reads of a launch: the kernel as Triton compiled it, its grid, and a parameter for every argument.

jax-triton compiles kernels one after the other while JAX lowers a program, and keeps none for the next process. Here Triton compiles them: its
cache on disk counts, and kernels of a program compile side by side in threads, begun when the program is traced."""

import concurrent.futures
import importlib
import math
import os
import re
import threading
import zlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import jaxlib.version

from .compile import compiled, scalar_type_name, Target
from .launch import Launch

FFI_TARGET = "triton_kernel_call_ffi"
"""jaxlib's foreign function that launches Triton kernels."""
_MOST_THREADS = 8


class Staged(NamedTuple):
    opaque: bytes
    """The call as jaxlib reads it."""
    scratch: int
    """Bytes that all programs together write descriptors to; a further result of the call, if not 0."""


def versions_unfit() -> str | None:
    """Why launches cannot be staged here with the installed jax-triton and jaxlib, as a clause without its subject: earlier ones have not been
    tried. Both must be installed."""
    from jax_triton import triton_lib

    if getattr(triton_lib, "CUSTOM_CALL_TARGET_NAME", None) != FFI_TARGET or not hasattr(
        triton_lib.CompilationResult, "global_scratch_size"
    ):
        return "needs jax-triton 0.4.1 or newer"
    installed = jaxlib.version.__version__
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < (0, 11, 1):
        return f"needs JAX 0.11.1 or newer, not {installed}"
    return None


def identity(launch: Launch) -> Hashable:
    """Equal for launches that are staged alike."""
    arrays = tuple((name, x.shape, str(x.dtype)) for name, x in {**launch.inputs, **launch.outputs}.items())
    numbers = (*launch.scalars.items(), *launch.constants.items())
    options = (launch.num_warps, launch.num_stages, launch.max_registers)
    return launch.function, launch.label, launch.grid, options, arrays, numbers


_lock = threading.Lock()
_stagings: dict[Hashable, "concurrent.futures.Future[Staged]"] = {}
"""Calls by what they are: a step of training traces each several times."""


def begin(launch: Launch, target: Target) -> "concurrent.futures.Future[Staged]":
    """Compiles the kernel in a thread, unless that has begun before."""
    key = identity(launch), target
    with _lock:
        if key not in _stagings:
            _stagings[key] = _threads().submit(_stage, launch, target)
        return _stagings[key]


_pool: concurrent.futures.ThreadPoolExecutor | None = None


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    global _pool
    if _pool is None:
        most = min(_MOST_THREADS, os.cpu_count() or 1)
        _pool = concurrent.futures.ThreadPoolExecutor(most, thread_name_prefix="ejkernel_eqx")
    return _pool


def _stage(launch: Launch, target: Target) -> Staged:
    library: Any = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    found = compiled(launch, target)
    about = found.metadata
    # As many warps as the kernel was compiled for: specialised ones are more than it was told.
    kernel = library.TritonKernel(
        about.name, about.num_warps, 1, about.shared, found.asm["ptx"], "", target.arch
    )
    parameters = [
        library.create_scalar_parameter(launch.scalars[name], scalar_type_name(launch.scalars[name]))
        if name in launch.scalars
        else library.create_array_parameter(0, 16)
        for name in (*launch.arguments, *launch.results)
        if launch.scalars.get(name) != 1  # a constant of the compiled kernel
    ]
    grid = (*launch.grid, 1, 1)[:3]
    # Where programs write descriptors is a buffer of XLA's. jaxlib would allocate one at every launch, which CUDA graphs cannot contain as XLA
    # makes them of several launches.
    scratch = about.global_scratch_size * math.prod(grid)
    if scratch:
        parameters.append(library.create_array_parameter(0, 128))
    call = library.TritonKernelCall(kernel, *grid, parameters).to_proto(launch.label, b"")
    return Staged(zlib.compress(call), scratch)
