"""Optional dependencies: imported here, with a remedy if they are missing."""

import sys
from typing import Any

_EXTRAS = {"triton": "triton", "jax-triton": "triton", "jax_triton": "triton", "libtpu": "tpu"}


def not_installed(package: str | None) -> str:
    """That a package is missing, and how it is installed, if that is by an extra of ours."""
    extra = _EXTRAS.get(str(package))
    if extra is None:
        return f"{package} is not installed"
    if sys.platform != "linux":
        return f"{package} is not installed (it is published for Linux only)"
    return f"{package} is not installed (pip install 'ejkernel-eqx[{extra}]')"


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
