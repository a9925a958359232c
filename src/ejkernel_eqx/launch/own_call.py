"""The launch of kernels that Triton compiles here, on NVIDIA GPUs: what jax-triton's call does, with kernels compiled as `staging` says.

Tracing begins the compilation and lowering waits for it, so a program's kernels compile side by side while the rest of it is traced."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .compile import Target
from .launch import Launch
from .staging import begin, FFI_TARGET, identity, versions_unfit
from .triton_call import triton_unavailable


@functools.cache
def own_target() -> Target | None:
    """What kernels are compiled for; `None` where jax-triton launches them: on other GPUs than NVIDIA's, and with other versions."""
    if triton_unavailable() is not None or versions_unfit() is not None:
        return None
    library: Any = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    if not hasattr(library, "create_tma_descriptor_parameter"):  # jaxlib has it with its CUDA plugin only
        return None
    capability = library.get_compute_capability(0)
    return Target(f"sm_{capability}", "cuda", capability, 32, 0)


def own_call(launch: Launch, arrays: dict[str, jax.Array], target: Target) -> list[jax.Array]:
    """Stage the launch; returns the outputs in the kernel's order. The kernel receives the operands and then the results, as its parameters are
    ordered."""
    assert not launch.aliases, f"{launch.label}: outputs in the place of inputs are left to jax-triton"
    begin(launch, target)
    operands = [arrays[name] for name in launch.arguments if name in arrays]
    return _call_p.bind(*operands, launch=_Described(launch), target=target)


class _Described:
    """A launch as a parameter of an operation of JAX: equal to those that are staged alike."""

    def __init__(self, launch: Launch):
        self.launch, self.key = launch, identity(launch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.launch.label


_call_p = Primitive("ejkernel_eqx_triton_call")
_call_p.multiple_results = True


@_call_p.def_abstract_eval
def _types(*_: Any, launch: _Described, target: Target) -> list[ShapedArray]:
    outputs = launch.launch.outputs
    return [ShapedArray(outputs[name].shape, outputs[name].dtype) for name in launch.launch.results]


@functools.lru_cache(maxsize=1024)
def _compiled_alone(launch: _Described, target: Target) -> Any:
    return jax.jit(functools.partial(_call_p.bind, launch=launch, target=target))


@_call_p.def_impl
def _run_alone(*operands: Any, launch: _Described, target: Target) -> Any:
    return _compiled_alone(launch, target)(*operands)


def _lowered(ctx: Any, *operands: Any, launch: _Described, target: Target) -> Any:
    staged = begin(launch.launch, target).result()
    scratch = [ShapedArray((staged.scratch,), jnp.uint8)] if staged.scratch else []
    rule = jax.ffi.ffi_lowering(FFI_TARGET, api_version=4)
    results = rule(ctx.replace(avals_out=[*ctx.avals_out, *scratch]), *operands, opaque=staged.opaque)
    return results[: len(ctx.avals_out)]


mlir.register_lowering(_call_p, _lowered, platform="cuda")
