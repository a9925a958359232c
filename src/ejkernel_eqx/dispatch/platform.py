"""Defines how a kernel is written (`Platform`) and what it runs on (`Backend`)."""

import enum
from typing import Literal, TYPE_CHECKING

from .._signatures import nearest


class Platform(enum.StrEnum):
    """Says how an implementation is written. Requested by name (`platform="triton"`) in any operation."""

    CUDA = "cuda"
    """The vendor's library (cuDNN)."""
    TRITON = "triton"
    """Triton, compiled for the GPU."""
    TRITON_INTERPRET = "triton-interpret"
    """The same Triton kernels, interpreted on the host: slow, for testing."""
    PALLAS = "pallas"
    """Pallas: Mosaic on TPU and on Hopper and newer GPUs."""
    PALLAS_INTERPRET = "pallas-interpret"
    """The Pallas kernels for TPU, interpreted on the host with races detected and memory poisoned: slow, for testing."""
    XLA = "xla"
    """Plain JAX, everywhere."""


PlatformName = Literal["cuda", "triton", "triton-interpret", "pallas", "pallas-interpret", "xla"]
"""The names of the platforms, for type checkers and editors."""

if TYPE_CHECKING:
    PlatformLike = PlatformName | Platform
else:
    PlatformLike = str  # any other name is refused by `parse_platform`, which lists those that there are
"""What `platform=` takes."""


class Backend(enum.StrEnum):
    """The kind of device an implementation runs on."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


def parse_platform(value: "str | Platform") -> Platform:
    """The `Platform` named by `value`; `ValueError` listing the names otherwise."""
    try:
        return Platform(value)
    except ValueError:
        names, meant = ", ".join(repr(p.value) for p in Platform), nearest(value, Platform)
        raise ValueError(
            f"platform: expected one of {names} or None, received {value!r}; use None to choose by device{meant}"
        ) from None
