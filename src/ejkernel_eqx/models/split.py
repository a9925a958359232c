"""Options of mixers for models whose tokens are split over a mesh axis."""

from typing import Any

from .config import DecoderConfig

_WHOLE = ("latent_attention", "native_sparse_attention", "cross_layer_attention")
"""Mixers that need all tokens of a row."""


def split_options(config: DecoderConfig, axis: str | None, order: str) -> dict[str, dict[str, Any]]:
    """The options of each mixer of a model whose tokens are split over a mesh axis, by the name of the mixer."""
    branches = [branch for layer in config.layers for branch in (layer, layer.beside) if branch is not None]
    names = dict.fromkeys(branch.mixer for branch in branches)
    if axis is None:
        if order != "contiguous":
            raise ValueError(
                f"token_order: expected 'contiguous' without sequence_axis, received {order!r}; name the mesh axis that splits the tokens."
            )
        return {}
    others = {"learned positions": config.max_positions, "shared blocks": config.shared_blocks}
    if whole := [*(n for n, it in others.items() if it is not None), *(n for n in names if n in _WHOLE)]:
        raise ValueError(
            f"sequence_axis: expected None for a model with {whole[0]}, which needs all tokens of a row, received {axis!r}; without it, they are "
            "gathered."
        )
    others = [name for name in names if name != "attention"]
    if order != "contiguous" and others:
        raise ValueError(
            f"token_order: expected 'contiguous' for a model with {others[0]}, which takes tokens in temporal order, received {order!r}; "
            "'zigzag' is for models of attention alone."
        )
    options: dict[str, dict[str, Any]] = {name: {"sequence_axis": axis} for name in others}
    if "attention" in names:
        options["attention"] = {"sequence_axis": axis, "token_order": order}
    return options
