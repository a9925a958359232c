"""Platform `cuda`: cuDNN's fused attention through the public `jax.nn.dot_product_attention`.

It has its own derivative, batching and partitioning rules. Whatever it cannot compute exactly is refused here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from ..dispatch import DeviceFacts, Problem
from .spec import AttentionArrays, AttentionSpec

OPAQUE = True
NOTE = "the backward is not guaranteed bitwise repeatable; deterministic=True avoids this platform"


@dataclasses.dataclass(frozen=True)
class CudnnConfig:
    """cuDNN chooses its own tiles, so there is nothing to configure."""


config_type = CudnnConfig


class Fault(NamedTuple):
    """What cuDNN is reported to compute wrongly."""

    mended: tuple[int, ...] | None
    """The first version without it; `None`: none is known."""
    where: Callable[[Problem, DeviceFacts], bool]
    words: str
    source: str


def _hopper(device: DeviceFacts) -> bool:
    return device.capability == (9, 0)


def _half_a_tile(problem: Problem, device: DeviceFacts) -> bool:
    """Whether queries see the end of the keys, and it is in the middle of a tile of 128. (Those of a causal call with T <= S do not: `attend` cuts
    the keys.)"""
    hidden = problem.flag("causal") and problem.dim("T") <= problem.dim("S")
    return _hopper(device) and problem.dim("S") % 128 == 64 and not hidden


def _wide_window(problem: Problem, device: DeviceFacts) -> bool:
    window: Any = problem.flag("window")
    return _hopper(device) and problem.dim("D") > 128 and window is not None and window[0] is not None


# Not a word of whether a backward is asked for: a forward alone is refused with it. An unknown version has all faults.
FAULTS = (
    Fault(
        None,
        lambda problem, device: problem.dim("T") == 1,
        "gradients of a single query can be NaN",
        "cudnn-frontend issue 1072: 9.25.1 and 9.26.0 on an H200; PyTorch pull request 194927: from 9.19 on Blackwell",
    ),
    Fault(
        (9, 26, 0),
        _half_a_tile,
        "gradients of queries whose scores are all below -88 are NaN where S modulo 128 is 64",
        "PyTorch issue 196678 and cudnn-frontend pull request 628: to 9.25.1 on Hopper",
    ),
    Fault(
        None,
        _wide_window,
        "gradients can be NaN for a window with head dims above 128",
        "NeMo Automodel issue 3232, which names no version, on an H100",
    ),
    Fault(
        (9, 15, 1),
        lambda problem, device: problem.dim("T") % 128 != 0 or problem.dim("S") % 128 != 0,
        "its backward can fail in CUDA graphs where a length is no multiple of 128",
        "Transformer Engine pull request 2344 and PyTorch pull request 167101: to 9.15.0",
    ),
)


def fault(problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the installed cuDNN is not to be trusted with the problem, whose lengths are numbers."""
    for known in FAULTS:
        if (known.mended is None or device.cudnn < known.mended) and known.where(problem, device):
            version = ".".join(map(str, device.cudnn)) or "of unknown version"
            remedy = f"; upgrade cuDNN to {'.'.join(map(str, known.mended))} or newer" if known.mended else ""
            return f"is denied: {known.words} (here cuDNN {version}; reported by {known.source}){remedy}"
    return None


def unavailable(device: DeviceFacts) -> str | None:
    if device.vendor != "nvidia":
        return f"needs an NVIDIA GPU, the device is {device.kind}"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, the device has {device.compute_capability or 'none'}"
    return None


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    for flag, words in (
        ("lse", "return_lse (its lse has no gradient)"),
        ("deterministic", "deterministic=True"),
        ("dropout", "dropout"),
        ("soft_cap", "logits_soft_cap"),
        ("bias", "bias"),
        ("mask", "mask"),
        ("score_mod", "score_mod"),
        ("tiles", "masks that are functions, unions, complements or maps of blocks"),
        ("segments", "segment ids"),
        ("rows", "lengths, packed sequences or per-row offsets"),
        ("sinks", "sinks"),
        ("alibi_slopes", "ALiBi slopes"),
        ("log_forget", "log_forget"),
    ):
        if problem.flag(flag):
            return f"does not take {words}"
    if problem.flag("nested") and device.count > 1:
        return "merges several leading axes into one, which gathers arrays that a mesh splits along them; merge them before the call"
    if problem.dtype("qkv") not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {problem.dtype('qkv')}"
    return _unsupported_sizes(problem, device)


def _unsupported_sizes(problem: Problem, device: DeviceFacts) -> str | None:
    head_dim, most = problem.dim("D"), 256 if device.capability >= (9, 0) else 128
    if problem.dim("V") != head_dim:
        return f"takes V = D only, not D {head_dim} and V {problem.dim('V')}"
    if head_dim % 8 or head_dim > most:
        return f"takes head dims that are multiples of 8 up to {most} on this device, not {head_dim}"
    if 0 in (problem.dim("B"), problem.dim("T"), problem.dim("S")):
        return "does not take empty arrays"
    has_lengths = isinstance(problem.dim("T"), int) and isinstance(problem.dim("S"), int)
    if has_lengths and (reason := fault(problem, device)) is not None:
        return reason
    if problem.dim("T") % 2 or problem.dim("S") % 2:
        return f"takes even sequence lengths only (because of its backward), not T {problem.dim('T')} and S {problem.dim('S')}"
    window: Any = problem.flag("window")
    if window is not None:
        if window[1] != 0:
            return "takes a window only with causal=True and without keys to the right"
        if not problem.flag("top_left"):
            return "aligns causal masks and windows top-left, so it takes q_offset=0 only, which is the default if T = S"
        if problem.flag("unseen") and problem.dim("T") > problem.dim("S"):
            return "does not take a window that leaves a query without keys: its output there would not be 0"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> CudnnConfig:
    return CudnnConfig()


def candidates(problem: Problem, device: DeviceFacts) -> list[CudnnConfig]:
    return [CudnnConfig()]


def attend(arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    """The output `[..., T, H, V]`, differentiable by cuDNN's own backward."""
    q, k, v = arrays.q, arrays.k, arrays.v
    if spec.right == 0 and k.shape[-3] > q.shape[-3]:
        # Aligned top-left, no query sees a key past the last query. cuDNN would read those keys in its last tile and multiply
        # their values, which may be NaN, by 0.
        k, v = (jax.lax.slice_in_dim(x, 0, q.shape[-3], axis=x.ndim - 3) for x in (k, v))
    lead = q.shape[:-3]
    flat = [x.reshape((-1, *x.shape[-3:])) for x in (q, k, v)]
    # JAX does not count the query's own key, as `left` does not. A window that reaches the first key hides nothing.
    window = None if spec.left is None or spec.left >= q.shape[-3] - 1 else (spec.left, 0)
    out = jax.nn.dot_product_attention(
        *flat, scale=spec.scale, is_causal=spec.right == 0, local_window_size=window, implementation="cudnn"
    )
    return out.reshape((*lead, *out.shape[1:]))
