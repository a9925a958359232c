"""Models whose tokens are split over a mesh axis."""

from typing import Any

from ..attention.ring.arguments import Split
from .config import DecoderConfig

_WHOLE = ("cross_layer_attention",)
"""Mixers that need all tokens of a row."""
_ATTENTION = ("attention", "latent_attention", "native_sparse_attention")
"""Mixers that take tokens in either order."""


def check_splittable(config: DecoderConfig, split: Split | None) -> None:
    """Raises `ValueError` for a model some of whose parts need all tokens of a row."""
    if split is None:
        return
    branches = [branch for layer in config.layers for branch in (layer, layer.beside) if branch is not None]
    others = {"learned positions": config.max_positions, "shared blocks": config.shared_blocks}
    whole = [name for name, it in others.items() if it is not None]
    whole += [branch.mixer for branch in branches if branch.mixer in _WHOLE]
    if whole:
        raise ValueError(
            f"sequence_axis: expected None for a model with {whole[0]}, which needs all tokens of a row, received {split.axis!r}; without it, they "
            "are gathered."
        )


def options_over(mixer: str, split: Split | None) -> dict[str, Any]:
    """The options of a mixer that say how tokens are split. Other mixers than attention take tokens in temporal order, into which their layer brings
    them."""
    if split is None:
        return {}
    return {"sequence_axis": split.axis} | ({"token_order": split.order} if mixer in _ATTENTION else {})
