"""Packages that only some functions need: asked for here, with the remedy where they are missing."""

from typing import Any


def require_matplotlib(what: str) -> Any:
    """`matplotlib`; `ImportError` that names `what` needs it and how to install it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs matplotlib, which is not installed; run: pip install 'ejkernel-eqx[report]'"
        ) from error
    return matplotlib
