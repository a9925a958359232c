"""Optional dependencies: imported here, with a remedy if they are missing."""

from typing import Any


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
