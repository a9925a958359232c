"""`LayerEmbedding`: further embeddings of the tokens, one for each layer."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._signatures import Module
from ..nn.few_rows import normed
from ..nn.parts import Parts
from ..nn.projection import project
from ..weights.fill import fill_fields
from .vocabulary import embed


class LayerEmbedding(Module):
    r"""Per-layer embeddings (Gemma 4): for each layer $l$ and token $t$ with the embedding $x$,

    $$\frac{1}{\sqrt 2} \Big( \sqrt{P}\, E_{t, l} + \mathrm{norm}\big((W x / \sqrt{E})_l\big) \Big)$$
    """

    embed_tokens_per_layer: Array  # [vocabulary, L * P]
    per_layer_model_projection: eqx.nn.Linear  # [L * P, E]
    per_layer_projection_norm: eqx.nn.RMSNorm  # [P]

    def __init__(self, config: Any, table: Array, norm: Any, parts: Parts):
        width = len(config.layers) * config.layer_embedding
        self.embed_tokens_per_layer = table
        self.per_layer_model_projection = parts.linear(config.embed_dim, width)
        self.per_layer_projection_norm = norm

    def __call__(self, tokens: Array, x: Array) -> Array:
        """Returns `[L, ..., T, P]` for tokens `[..., T]` with the embeddings `x [..., T, E]`."""
        features = self.per_layer_projection_norm.shape[0]
        width = self.per_layer_model_projection.weight.shape[0]
        of_tokens = embed(self.embed_tokens_per_layer, tokens).astype(x.dtype) * math.sqrt(features)
        projection = self.per_layer_model_projection
        projected = project("per_layer_model_projection", projection, x, width) / math.sqrt(x.shape[-1])
        apart = lambda a: jnp.moveaxis(a.reshape(*x.shape[:-1], -1, features), -2, 0)
        return (normed(self.per_layer_projection_norm, apart(projected)) + apart(of_tokens)) / math.sqrt(2)

    def _published(self, weights: Any) -> "LayerEmbedding":
        return fill_fields(self, weights, {"embed_tokens_per_layer": "embed_tokens_per_layer.weight"})
