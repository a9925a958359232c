"""The mixers that a decoder may have, by name."""

from collections.abc import Callable
from typing import Any

from .. import nn
from .cross_layer_attention import CrossLayerAttention


def _without_place(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The class without the arguments for the place of a layer in the model, on which it does not depend."""
    return lambda embed_dim, *, layer_index, num_layers, **options: layer(embed_dim, **options)


MIXERS: dict[str, Callable[..., Any]] = {
    "attention": _without_place(nn.MultiHeadAttention),
    "cross_layer_attention": _without_place(CrossLayerAttention),
    "latent_attention": _without_place(nn.MultiHeadLatentAttention),
    "native_sparse_attention": _without_place(nn.NativeSparseAttention),
    "mamba1": _without_place(nn.Mamba1Mixer),
    "mamba2": _without_place(nn.Mamba2Mixer),
    "mamba3": _without_place(nn.Mamba3Mixer),
    "gated_linear_attention": _without_place(nn.GatedLinearAttention),
    "lightning_attention": nn.LightningAttention,
    "kimi_delta_attention": _without_place(nn.KimiDeltaAttention),
    "gated_delta_net": _without_place(nn.GatedDeltaNet),
    "gated_short_convolution": _without_place(nn.GatedShortConvolution),
}
