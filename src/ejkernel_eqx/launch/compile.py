"""Compiling a launch ahead of time, for a device that need not be present, to check that it fits."""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import numpy as np

from .._errors import not_installed
from ..dispatch import Backend, DeviceFacts
from ..dispatch.device import shared_memory_limit
from ._disk_cache import through_cache
from ._language_lock import language_lock
from ._while_used import collector_paused
from .launch import Launch


@functools.cache
def interpreter_unavailable() -> str | None:
    """The reason why kernels can be neither interpreted nor compiled here, as a sentence; `None` if they can. Only Triton is needed."""
    if importlib.util.find_spec("triton") is None:
        return not_installed("triton") + "."
    return None


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU architecture to compile for; `shared_limit` is the shared memory per block in bytes."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, shared_memory_limit("nvidia", "8.0")),
        Target("sm_90", "cuda", 90, 32, shared_memory_limit("nvidia", "9.0")),
        Target("sm_100", "cuda", 100, 32, shared_memory_limit("nvidia", "10.0")),
        Target("gfx942", "hip", "gfx942", 64, shared_memory_limit("amd", "gfx942")),
    )
}

# Architectures not listed are newer or older than those known to compile.
_CUDA_ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 120)

TENSOR_MEMORY_LIMIT = 512
"""Columns of a Blackwell multiprocessor's tensor memory. Triton compiles a kernel that needs more to one that traps, and the GPU hangs."""


def target_for(device: DeviceFacts) -> Target | None:
    """The architecture of a device, with its shared memory; `None` if it is not a GPU or not known to compile."""
    if device.backend is not Backend.GPU:
        return None
    arch = 10 * device.capability[0] + device.capability[1]
    if device.vendor == "nvidia" and arch in _CUDA_ARCHITECTURES:
        return Target(f"sm_{arch}", "cuda", arch, 32, device.shared_memory)
    known = next((t for t in TARGETS.values() if device.compute_capability.split(":")[0] == t.arch), None)
    return (
        dataclasses.replace(known, shared_limit=device.shared_memory or known.shared_limit) if known else None
    )


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The resources that a launch needs on a target.

    - `shared`: shared memory per block in bytes; `shared_limit`: that of the target.
    - `registers`: per thread (vector registers on AMD).
    - `spills`: 0 if all values stay in registers, else bytes of stack per thread (NVIDIA) or spilled registers
        (AMD).
    - `fits`: whether the target can run it at all. Spills slow a kernel down but do not affect its results.
    """

    target: str
    shared: int
    registers: int
    spills: int
    shared_limit: int
    fits: bool


def compile_ahead(launch: Launch, target: str | Target) -> CompileReport:
    """Compile `launch` as jax-triton would: with the same types, alignment, constants and options.

    **Arguments:**

    - `launch`: the description of the launch; nothing is run, and no arrays are needed.
    - `target`: a `Target`, or the name of one of `TARGETS`.

    **Raises:** `ValueError` for an unknown target, and Triton's own exception for a kernel that does not compile.
    """
    if isinstance(target, str):
        if target not in TARGETS:
            raise ValueError(
                f"compile_ahead: unknown target {target!r}; known targets are {sorted(TARGETS)}."
            )
        target = TARGETS[target]
    reason = interpreter_unavailable()
    if reason is not None:
        raise RuntimeError(f"The Triton kernel {launch.label} cannot be compiled: {reason}")
    found = compiled(launch, target)
    registers, spills = (_cuda_usage if target.backend == "cuda" else _hip_usage)(found)
    shared = found.metadata.shared
    tensor_memory = getattr(found.metadata, "tmem_size", None) or 0
    fits = shared <= target.shared_limit and tensor_memory <= TENSOR_MEMORY_LIMIT
    return CompileReport(target.name, shared, registers, spills, target.shared_limit, fits)


def compiled(launch: Launch, target: Target) -> Any:
    """Returns what Triton's compiler makes of the launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source: Any = ASTSource
    if launch.is_gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    signature, constants, attributes = specialisation(launch)
    # Only NVIDIA's backend knows a limit on registers.
    limit = {"maxnreg": launch.max_registers} if launch.max_registers and target.backend == "cuda" else {}

    def compiling() -> Any:
        return triton.compile(
            source(launch.function, signature, constants, attributes),
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={
                "num_warps": launch.num_warps,
                "num_stages": launch.num_stages,
                "num_ctas": 1,
                "enable_fp_fusion": True,
                **limit,
            },
        )

    with language_lock.shared(), collector_paused:
        return through_cache(compiling, "ptx" if target.backend == "cuda" else "amdgcn")


def specialisation(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list]]:
    """Signature, constants and attributes that jax-triton (0.3.1 and 0.4.1) passes to the compiler.

    Every array is assumed to be aligned to 16 bytes. A scalar equal to 1 becomes a constant; nothing else is
    assumed of scalars, not even divisibility by 16, so a stride that should vectorise belongs in the constants."""
    arrays = {**launch.inputs, **launch.outputs}
    signature, constants, attributes = {}, dict(launch.constants), {}
    for index, name in enumerate(launch.function.arg_names):
        if name in arrays:
            signature[name] = "*" + _type_name(arrays[name].dtype)
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in launch.scalars and launch.scalars[name] != 1:
            signature[name] = scalar_type_name(launch.scalars[name])
        else:
            signature[name] = "constexpr"
            constants[name] = launch.constants.get(name, 1)
    return signature, constants, attributes


_TYPE_NAMES = {
    "bool": "i1",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
}


def _type_name(dtype: Any) -> str:
    """Triton's name of an array's dtype: `bf16`, `fp32`, `i64`, `u8`, ..."""
    name = np.dtype(dtype).name
    if name in _TYPE_NAMES:
        return _TYPE_NAMES[name]
    return re.sub(r"^(float|uint|int)", lambda m: {"float": "fp", "uint": "u", "int": "i"}[m[1]], name)


def scalar_type_name(value: int) -> str:
    for name, low, high in (("i32", -(2**31), 2**31), ("u32", 2**31, 2**32), ("i64", -(2**63), 2**63)):
        if low <= value < high:
            return name
    return "u64"


def _cuda_usage(compiled: Any) -> tuple[int, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text)


def _hip_usage(compiled: Any) -> tuple[int, int]:
    text = compiled.asm["amdgcn"]
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(r"\.sgpr_spill_count:\s*(\d+)", text)
    return _number(r"\.vgpr_count:\s*(\d+)", text), spills


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in the compiler's output"
    return int(match[1])
