"""The launch of kernels that Triton compiles here, on NVIDIA GPUs: what jax-triton's call does, with kernels compiled as `staging` says.

Tracing begins the compilation and lowering waits for it, so a program's kernels compile side by side while the rest of it is traced."""

import contextlib
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..dispatch import DeviceFacts, facts_of_calls
from ..dispatch.environment import declare
from .compile import Target
from .launch import Launch
from .staging import begin, FFI_TARGET, get_ready, identity, staged, versions_unfit
from .triton_call import kept_apart, triton_unavailable

_WAYS = ("own", "jax-triton")


def _parse_way(text: str) -> str:
    if text.lower() not in _WAYS:
        raise ValueError(f"expected one of {', '.join(_WAYS)}, received {text!r}.")
    return text.lower()


LAUNCH = declare(
    "EJKERNEL_EQX_LAUNCH",
    "who compiles and launches Triton kernels on NVIDIA GPUs: own (in threads, with Triton's cache on disk), jax-triton",
    _parse_way,
    "own",
)


def expect_launches() -> None:
    """Called where Triton kernels are chosen for an NVIDIA GPU, which is long before the first is traced."""
    with contextlib.suppress(ValueError):  # a wrong value is told where a kernel is launched
        if LAUNCH.read() == "own" and _can_stage():
            get_ready()


def own_target() -> Target | None:
    """Returns what a kernel traced here is compiled for; `None` where jax-triton launches it: on other GPUs than NVIDIA's, with other versions,
    and where `EJKERNEL_EQX_LAUNCH` says so."""
    if LAUNCH.read() != "own" or not _can_stage():
        return None
    device = facts_of_calls()
    if device.capability == (0, 0):  # traced for a device that is not here
        return None
    major, minor = device.capability
    return Target(f"sm_{major}{minor}", "cuda", 10 * major + minor, 32, device.shared_memory)


@functools.cache
def _can_stage() -> bool:
    if triton_unavailable() is not None or versions_unfit() is not None:
        return False
    library: Any = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    return hasattr(library, "create_tma_descriptor_parameter")  # jaxlib has it with its CUDA plugin only


def gluon_unavailable(device: DeviceFacts) -> str | None:
    """The reason why Gluon kernels cannot be launched on `device` with the installed software, as a clause without its
    subject. `None` if they can. Gluon kernels are written for one architecture, Hopper, and only `own_call` launches
    them. jax-triton 0.4.1 cannot: it compiles Gluon sources with the passes of Triton's, and launches as many warps as
    it is told. A kernel with specialised warps has more."""
    if device.vendor != "nvidia" or device.capability != (9, 0):
        return f"needs compute capability 9.0, the device has {device.compute_capability or 'none'}"
    reason = triton_unavailable()
    return versions_unfit() if reason is None else f"needs Triton and jax-triton: {reason.rstrip('.')}"


def own_call(launch: Launch, arrays: dict[str, jax.Array], target: Target) -> list[jax.Array]:
    """Stage the launch; returns the outputs in the kernel's order. The kernel receives the operands and then the results, as its parameters are
    ordered: an aliased buffer twice, as the input and as the output."""
    begin(launch, target)
    arrays = arrays | kept_apart({name: arrays[name] for name in launch.aliases})
    operands = [arrays[name] for name in launch.arguments if name in arrays]
    outputs = _call_p.bind(*operands, launch=_Described(launch), target=target)
    by_name = dict(zip(launch.results, outputs, strict=True))
    by_name |= kept_apart({name: by_name[name] for name in launch.aliases.values()})
    return [by_name[name] for name in launch.results]


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
    described = launch.launch
    call = staged(described, target)
    scratch = [ShapedArray((call.scratch,), jnp.uint8)] if call.scratch else []
    names, results = [name for name in described.arguments if name in described.inputs], described.results
    aliases = {names.index(source): results.index(result) for source, result in described.aliases.items()}
    rule = jax.ffi.ffi_lowering(FFI_TARGET, api_version=4, operand_output_aliases=aliases)
    made = rule(ctx.replace(avals_out=[*ctx.avals_out, *scratch]), *operands, opaque=call.opaque)
    return made[: len(ctx.avals_out)]


def _lowered_elsewhere(ctx: Any, *_: Any, launch: _Described, target: Target) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(
        f"The Triton kernel {launch.launch.label}, compiled for {target.name}, cannot be lowered for {platforms}: it was chosen while tracing, "
        "for the default device. For several platforms in one program, name platform='xla'."
    )


mlir.register_lowering(_call_p, _lowered_elsewhere)
mlir.register_lowering(_call_p, _lowered, platform="cuda")


def _no_vmap(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("A launch has no vmap rule; fold the batch beforehand with `custom_vmap`.")


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("A launch has no derivative; define one around it with `custom_vjp`.")


batching.primitive_batchers[_call_p] = _no_vmap
ad.primitive_jvps[_call_p] = _no_derivative
