"""Options of mixers for models whose tokens are split over a mesh axis."""

from typing import Any

from ..attention.ring.arguments import Split
from .config import DecoderConfig

_WHOLE = ("cross_layer_attention",)
"""Mixers that need all tokens of a row."""
_ATTENTION = ("attention", "latent_attention", "native_sparse_attention")
"""Mixers that take tokens in either order."""


def split_options(config: DecoderConfig, split: Split | None) -> dict[str, dict[str, Any]]:
    """The options of each mixer of a model whose tokens are split over a mesh axis, by the name of the mixer. Other mixers than attention take tokens
    in temporal order, into which their layer brings them."""
    if split is None:
        return {}
    branches = [branch for layer in config.layers for branch in (layer, layer.beside) if branch is not None]
    names = dict.fromkeys(branch.mixer for branch in branches)
    others = {"learned positions": config.max_positions, "shared blocks": config.shared_blocks}
    if whole := [*(n for n, it in others.items() if it is not None), *(n for n in names if n in _WHOLE)]:
        raise ValueError(
            f"sequence_axis: expected None for a model with {whole[0]}, which needs all tokens of a row, received {split.axis!r}; without it, they "
            "are gathered."
        )
    order_of = lambda name: {"token_order": split.order} if name in _ATTENTION else {}
    return {name: {"sequence_axis": split.axis} | order_of(name) for name in names}
