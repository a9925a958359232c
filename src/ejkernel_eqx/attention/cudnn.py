"""Platform `cuda`: cuDNN's fused attention through the public `jax.nn.dot_product_attention`.

It has its own derivative, batching and partitioning rules. Whatever it cannot compute exactly is refused here.
"""

import dataclasses
from typing import Any

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
