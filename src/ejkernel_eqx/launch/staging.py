"""Defines what jaxlib reads of a launch: the kernel as Triton compiled it, its grid, and a parameter for every argument.

jax-triton compiles kernels one after the other while JAX lowers a program, and keeps none for the next process. Here Triton compiles them: its
cache on disk counts, and kernels of a program compile side by side in threads, begun when the program is traced."""

import concurrent.futures
import functools
import importlib
import math
import os
import re
import threading
import zlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import jaxlib.version

from ._disk_cache import identify_triton
from ._workers import Workers
from .compile import compiled, scalar_type_name, specialisation, Target, TENSOR_MEMORY_LIMIT
from .launch import Launch

FFI_TARGET = "triton_kernel_call_ffi"
"""jaxlib's foreign function that launches Triton kernels."""
# What a kernel's hidden parameters and metadata are known of. Gluon of 3.9 has no more the names that Hopper's kernels call.
_TRITONS = ("3.7", "3.8")
_MOST_THREADS = 8


class Kernel(NamedTuple):
    """A compiled kernel, as much of it as a launch needs."""

    name: str
    num_warps: int
    """As many as it was compiled for: specialised warps are more than it was told."""
    shared: int
    scratch: int
    """Bytes that each program writes descriptors to."""
    ptx: str


class Staged(NamedTuple):
    opaque: bytes
    """The call as jaxlib reads it."""
    scratch: int
    """Bytes that all programs together write descriptors to; a further result of the call, if not 0."""


def versions_unfit() -> str | None:
    """The reason why launches cannot be staged here with the installed jax-triton, Triton and jaxlib, as a clause without its subject: others have
    not been tried. All must be installed."""
    import triton
    from jax_triton import triton_lib

    if getattr(triton_lib, "CUSTOM_CALL_TARGET_NAME", None) != FFI_TARGET or not hasattr(
        triton_lib.CompilationResult, "global_scratch_size"
    ):
        return "needs jax-triton 0.4.1 or newer"
    if not triton.__version__.startswith(tuple(f"{known}." for known in _TRITONS)):
        return f"needs Triton {' or '.join(_TRITONS)}, not {triton.__version__} (pip install 'triton>=3.7.1,<3.8')"
    installed = jaxlib.version.__version__
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < (0, 11, 1):
        return f"needs JAX 0.11.1 or newer, not {installed}"
    return None


def identity(launch: Launch) -> Hashable:
    """Equal for launches that are staged alike."""
    shapes = tuple((name, x.shape) for name, x in {**launch.inputs, **launch.outputs}.items())
    scalars, aliases = tuple(launch.scalars.items()), tuple(launch.aliases.items())
    return _kernel_identity(launch), launch.label, launch.grid, shapes, scalars, aliases


def _kernel_identity(launch: Launch) -> Hashable:
    """Equal for launches of one compiled kernel, whatever their grids, lengths and numbers."""
    signature, constants, _ = specialisation(launch)
    exact = tuple((name, _exact(value)) for name, value in constants.items())
    options = launch.num_warps, launch.num_stages, launch.max_registers
    # The Python function: to hash a `JITFunction` is to parse its source.
    return launch.function.fn, tuple(signature.items()), exact, options


def _exact(value: Any) -> Hashable:
    """Differs where Triton compiles differently: 1, 1.0 and True are equal to Python, and so are 0.0 and -0.0."""
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return type(value), repr(value) if isinstance(value, float) else value


_lock = threading.Lock()
_workers = Workers(min(_MOST_THREADS, os.cpu_count() or 1))
_kernels: dict[Hashable, "concurrent.futures.Future[Kernel]"] = {}
"""Kernels that are compiled or will be."""


@functools.cache
def get_ready() -> None:
    """Begins what the first compilation of a process waits for."""
    _survive_forks()
    _workers.submit(identify_triton)


def begin(launch: Launch, target: Target) -> "concurrent.futures.Future[Kernel]":
    """Compiles the kernel in a thread, unless that has begun before."""
    _survive_forks()
    key = _kernel_identity(launch), target
    with _lock:
        if key not in _kernels:
            _kernels[key] = _workers.submit(lambda: _compile(launch, target))
        return _kernels[key]


@functools.cache
def _survive_forks() -> None:
    os.register_at_fork(after_in_child=_start_over)


def _start_over() -> None:
    """A forked process has none of the threads, and locks may be held by them."""
    global _lock, _workers
    _lock, _workers = threading.Lock(), Workers(min(_MOST_THREADS, os.cpu_count() or 1))
    for key in [key for key, kernel in _kernels.items() if not kernel.done()]:
        del _kernels[key]


def staged(launch: Launch, target: Target) -> Staged:
    """The launch as an operand of `FFI_TARGET`; waits for the kernel.

    **Raises:** `RuntimeError` if the kernel does not compile. The next call tries again."""
    key = _kernel_identity(launch), target
    try:
        try:
            kernel = begin(launch, target).result()
        except concurrent.futures.CancelledError:  # the main thread has ended, and this one has not
            with _lock:
                _kernels.pop(key, None)
            kernel = begin(launch, target).result()
        return _stage(launch, kernel, target)
    # A kernel's body is arbitrary code, and Triton's passes raise what they like: the error must name the kernel.
    except Exception as error:
        with _lock:
            _kernels.pop(key, None)
        raise RuntimeError(
            f"The Triton kernel {launch.label} cannot be launched on {target.name}: {type(error).__name__}: {error}. Choose another configuration "
            "(config=), or platform='xla'."
        ) from error


def _compile(launch: Launch, target: Target) -> Kernel:
    found = compiled(launch, target)
    about = found.metadata
    if about.tmem_size > TENSOR_MEMORY_LIMIT:
        raise ValueError(
            f"it takes {about.tmem_size} columns of tensor memory, of which there are {TENSOR_MEMORY_LIMIT}"
        )
    if about.profile_scratch_size:
        raise ValueError(
            "it was compiled to be profiled by Proton, whose buffer a launch from JAX does not have; unset "
            "TRITON_INSTRUMENTATION_MODE"
        )
    return Kernel(about.name, about.num_warps, about.shared, about.global_scratch_size, found.asm["ptx"])


def _stage(launch: Launch, kernel: Kernel, target: Target) -> Staged:
    library: Any = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
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
    scratch = kernel.scratch * math.prod(grid)
    if scratch:
        parameters.append(library.create_array_parameter(0, 128))
    native = library.TritonKernel(
        kernel.name, kernel.num_warps, 1, kernel.shared, kernel.ptx, "", target.arch
    )
    call = library.TritonKernelCall(native, *grid, parameters).to_proto(launch.label, b"")
    return Staged(zlib.compress(call), scratch)
