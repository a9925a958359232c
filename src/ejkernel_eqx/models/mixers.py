"""The mixers that a decoder may have, by name."""

from collections.abc import Callable
from typing import Any

from .. import nn
from .cross_layer_attention import CrossLayerAttention


def _without_place(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The class without the arguments for the place of a layer in the model, on which it does not depend."""
    return lambda embed_dim, *, layer_index, num_layers, **options: layer(embed_dim, **options)


LAYERS: dict[str, Any] = {
    "attention": nn.MultiHeadAttention,
    "cross_layer_attention": CrossLayerAttention,
    "latent_attention": nn.MultiHeadLatentAttention,
    "native_sparse_attention": nn.NativeSparseAttention,
    "mamba1": nn.Mamba1Mixer,
    "mamba2": nn.Mamba2Mixer,
    "mamba3": nn.Mamba3Mixer,
    "gated_linear_attention": nn.GatedLinearAttention,
    "lightning_attention": nn.LightningAttention,
    "kimi_delta_attention": nn.KimiDeltaAttention,
    "gated_delta_net": nn.GatedDeltaNet,
    "gated_short_convolution": nn.GatedShortConvolution,
}
"""The class of each."""

MIXERS: dict[str, Callable[..., Any]] = {
    name: layer if layer is nn.LightningAttention else _without_place(layer) for name, layer in LAYERS.items()
}
