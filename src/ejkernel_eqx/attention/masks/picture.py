"""A picture of a mask. matplotlib is imported only here, and only when a picture is drawn."""

import pathlib
from typing import Any

import numpy as np

from ..._errors import require_matplotlib

_SUFFIXES = (".png", ".svg", ".pdf")
_VISIBLE, _HIDDEN, _LINES = "#2a6f97", "#eef1f4", "#ffffff"
_INCHES, _LEAST, _MOST = 0.2, 2.0, 10.0
_MOST_WITH_LINES = 64


def save_picture(grid: np.ndarray, path: Any) -> None:
    """Saves `grid` `[T, S]` to a file, one square per pair, visible pairs dark."""
    path = pathlib.Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"path: expected a file name ending in {', '.join(_SUFFIXES)}, received {str(path)!r}."
        )
    require_matplotlib("Mask.visualize(path=...)")
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    height, width = (min(_MOST, max(_LEAST, _INCHES * size)) for size in grid.shape)
    figure = Figure(figsize=(width + 0.8, height + 0.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="key", ylabel="query")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    if grid.size:
        queries, keys = grid.shape
        colours = ListedColormap([_HIDDEN, _VISIBLE])
        axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.locator_params(integer=True)
        if max(queries, keys) <= _MOST_WITH_LINES:
            axes.hlines(np.arange(1, queries) - 0.5, -0.5, keys - 0.5, colors=_LINES, linewidth=0.5)
            axes.vlines(np.arange(1, keys) - 0.5, -0.5, queries - 0.5, colors=_LINES, linewidth=0.5)
    figure.savefig(path, dpi=120)
