"""Defines where kernels in Gluon can be launched: it is written for one architecture, Hopper, and only `own_call` launches it.

(jax-triton 0.4.1 compiles Gluon sources with the passes of Triton's, and launches as many warps as it is told, where a kernel with specialised
warps has more.)"""

from ..dispatch import DeviceFacts
from .staging import versions_unfit
from .triton_call import triton_unavailable

_HOPPER = (9, 0)


def gluon_unavailable(device: DeviceFacts) -> str | None:
    """The reason why Gluon kernels cannot be launched on `device` with the installed software, as a clause without its subject; `None` if they
    can."""
    if device.vendor != "nvidia" or device.capability != _HOPPER:
        return f"needs compute capability 9.0, the device has {device.compute_capability or 'none'}"
    reason = triton_unavailable()
    return versions_unfit() if reason is None else f"needs Triton and jax-triton: {reason.rstrip('.')}"
