"""The exceptions of this package, and what is said of packages that are not installed.

Invalid arguments raise `ValueError`; the exceptions cover everything else."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any


class EjkernelError(Exception):
    """Base class of the exceptions that `ejkernel_eqx` defines."""


class UnsupportedError(EjkernelError):
    """No permitted platform can run the request.

    **Arguments:**

    - `operation`: the name of the operation, such as `"FlashAttention"`.
    - `reasons`: maps platform names (or enumeration members) to the reasons why they cannot run the request.
    - `remedy`: optional sentence on what to change.

    All are available as attributes, `reasons` with plain strings as keys; the message lists every platform.
    """

    operation: str
    reasons: dict[str, str]
    remedy: str | None

    def __init__(self, operation: str, reasons: Mapping, remedy: str | None = None):
        self.operation = operation
        self.reasons = {str(getattr(platform, "value", platform)): why for platform, why in reasons.items()}
        self.remedy = remedy
        # The arguments instead of the message, so that the exception can be pickled between processes.
        super().__init__(operation, self.reasons, remedy)

    def __str__(self) -> str:
        if not self.reasons:
            message = f"{self.operation}: no platform is registered for this operation."
        elif len(self.reasons) == 1:
            ((platform, why),) = self.reasons.items()
            message = f"{self.operation} cannot run this request on platform {platform!r}: {why}"
        else:
            lines = [f"  {platform}: {why}" for platform, why in self.reasons.items()]
            message = "\n".join([f"{self.operation} cannot run this request on any platform:", *lines])
        return message if self.remedy is None else f"{message}\n{self.remedy}"


class TuningError(EjkernelError):
    """Tuning was requested where it is impossible, or ended without a usable configuration."""


class CheckpointError(EjkernelError, ValueError):
    """A checkpoint is unrecognised, damaged, newer than this package, or does not fit the model it is loaded into.
    The message names the file."""


_EXTRAS = {"triton": "triton", "jax-triton": "triton", "jax_triton": "triton", "libtpu": "tpu"}


def not_installed(package: str | None) -> str:
    """That a package is missing, and how it is installed, if that is by an extra of ours."""
    extra = _EXTRAS.get(str(package))
    if extra is None:
        return f"{package} is not installed"
    if sys.platform != "linux":
        return f"{package} is not installed (it is published for Linux only)"
    return f"{package} is not installed (pip install 'ejkernel-eqx[{extra}]')"


def require(module: str, what: str, extra: str) -> Any:
    """A module of an extra of ours, or an `ImportError` that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs {error.name}, which is not installed; run: pip install 'ejkernel-eqx[{extra}]'"
        ) from error


def require_matplotlib(what: str) -> Any:
    """`matplotlib`, or an `ImportError` that says what needs it and how to install it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs matplotlib, which is not installed; run: pip install 'ejkernel-eqx[report]'"
        ) from error
    return matplotlib
