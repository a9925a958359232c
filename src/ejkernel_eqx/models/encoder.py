"""`Encoder`: one class for all published encoders. It has the layers of a decoder, whose tokens see in both directions."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._jitted import compiled_call
from .._signatures import Module
from .._values import checked
from ..nn.few_rows import Norm, normed
from ..nn.initial import keys_of, normal
from .config import EncoderConfig
from .decoder import Decoder, TIED_STD
from .filling_encoders import filled_encoder
from .mlp import norm_of
from .pooler import Pooler
from .positions import positions_of
from .vocabulary import check_rows, embed, in_vocabulary


class Encoder(Module):
    r"""A model whose tokens see each other in both directions: an embedding, layers of attention and an MLP each, a norm.

    $$x_0 = s\,E[\mathrm{tokens}] + P[\mathrm{positions}] + Y[\mathrm{types}], \qquad x_{l+1} = \mathrm{layer}_l(x_l), \qquad
      y = \mathrm{norm}(x_L)$$

    $P$ and $Y$ are learned embeddings of positions and of types of tokens. Both are optional. An
    [`EncoderConfig`][ejkernel_eqx.models.EncoderConfig] describes the model. Its `body` is a [`Decoder`][ejkernel_eqx.models.Decoder] without a head,
    whose layers are not causal. The heads of published models are not read: those for masked words and for classes, and BERT's pooler.
    [`embed`][ejkernel_eqx.models.embed] makes vectors of texts.

    Source: Devlin et al., *BERT* (2018, arXiv:1810.04805); Warner et al., *ModernBERT* (2024, arXiv:2412.13663).
    """

    body: Decoder
    positions: Array | None  # [num_positions, E]
    token_types: Array | None  # [num_token_types, E]
    embedding_norm: Norm | None
    pooler: Pooler | None  # of `embed`, where the published model has one
    config: EncoderConfig = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike | None = None, key: Array, **options: Any):
        """**Arguments:**

        - `config`: the architecture.
        - `dtype`, `key`, `options`: as in [`Decoder`][ejkernel_eqx.models.Decoder].
        """
        if not isinstance(config, EncoderConfig):
            raise ValueError(
                f"config: expected an EncoderConfig, received {type(config).__name__}; ejx.models.encoder_config(dict) reads a published one."
            )
        body_key, *keys = keys_of(key, 3)
        self.body = Decoder(config.body, dtype=dtype, key=body_key, **options)
        width, dtype, eps = config.body.embed_dim, self.body.embedding.dtype, config.body.norm_eps
        table = lambda key, rows: normal(key, (rows, width), dtype, TIED_STD) if rows else None
        self.positions = table(keys[0], config.num_positions)
        self.token_types = table(keys[1], config.num_token_types)
        norm = norm_of(config.body.norm_type, width, eps, dtype)
        self.embedding_norm, self.pooler, self.config = norm if config.embedding_norm else None, None, config

    @compiled_call("ejx.models.Encoder")
    def __call__(
        self,
        tokens: Array,
        *,
        token_types: Array | None = None,
        padding_mask: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """**Arguments:**

        - `tokens`: integers `[..., T]`, as in [`Decoder`][ejkernel_eqx.models.Decoder].
        - `token_types`: integers `[..., T]`, the type of each token, for models with types; default 0.
        - `padding_mask`: bool `[..., T]`, True for real tokens, which must be side by side in each row.
        - `segment_ids`: integers `[..., T]`, for several texts in one row. Tokens see only those with the same id, which must be side by side.
            Positions count within each text. Negative ids are padding.

        **Returns:** the features of the tokens `[..., T, E]` in the dtype of the computation. Those of padding are undefined.

        **Raises:** `ValueError` for arguments that do not fit; where values are known, also for tokens outside of the vocabulary and for more tokens
        than the model has positions.
        """
        rows = {"padding_mask": padding_mask, "segment_ids": segment_ids}
        check_rows(tokens, rows | {"token_types": token_types})
        rows = {name: value for name, value in rows.items() if value is not None}
        body = self.body
        tokens = in_vocabulary(tokens, body.embedding.shape[0], rows)
        x = embed(body.embedding, tokens) * jnp.asarray(body.config.embedding_scale, body.embedding.dtype)
        if self.positions is not None:
            first = self.config.first_position
            at = positions_of(tokens, rows, self.config.num_positions - first)
            x = x + embed(self.positions, at + first)
        if self.token_types is not None:
            given = np.zeros(tokens.shape, np.int32) if token_types is None else token_types
            count = self.config.num_token_types
            say = lambda found: f"token_types: expected numbers below {count}, the model's, received {found}."
            types = checked(jnp.asarray(given), given, lambda x: (x < 0) | (x >= count), say)
            x = x + embed(self.token_types, types)
        elif token_types is not None:
            raise ValueError(
                "token_types: expected None, as this model has no kinds of tokens, received an array."
            )
        x = x.astype(x.dtype if body.compute_dtype is None else body.compute_dtype)
        return body.through_layers(normed(self.embedding_norm, x), rows)[0]

    _published = filled_encoder
