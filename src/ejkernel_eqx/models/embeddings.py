"""`embed`: vectors of texts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..nn.arguments import check_sizes
from .decoder import Decoder
from .encoder import Encoder
from .pooler import Pooler
from .prompts import in_few_sizes, rows_of


def embed(
    model: Encoder | Decoder,
    tokens: Any,
    *,
    padding_mask: Any = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    batch_size: int = 32,
) -> Array:
    """A vector for each text.

    ```python
    model = ejx.models.from_pretrained("all-MiniLM-L6-v2")
    vectors = ejx.models.embed(model, [[101, 7592, 102], [101, 2088, 999, 102]])
    ```

    How is decided by the files of sentence-transformers in the folder of the model, which `from_pretrained` reads into `model.pooler`
    ([`Pooler`][ejkernel_eqx.models.Pooler]). Without them an encoder takes the mean, a decoder the last token, and both are normalised.

    Gradients reach the weights of the model.

    **Arguments:**

    - `model`: an `Encoder` or a `Decoder`.
    - `tokens`: a list of tokens for each text, of any lengths; or integers `[..., T]`. They come from the model's own tokenizer, with the tokens that
        it adds at the beginning and the end.
    - `padding_mask`: with an array, bool `[..., T]`, True for real tokens, which are side by side; default all.
    - `pooling`, `normalize`: in the place of those of the model: `"mean"`, `"max"`, `"last"`, `"first"`; True or False.
    - `batch_size`: how many texts of lists go through the model at once. Texts of similar lengths go together, padded to a power of two or one and a
        half times one, so that few programs are compiled.

    **Returns:** float32 vectors `[..., E]`, for lists `[N, E]`.

    **Raises:** `ValueError` for texts without tokens, tokens that the model does not have, and texts longer than its positions.
    """
    if not isinstance(model, Encoder | Decoder):
        raise ValueError(f"model: expected an Encoder or a Decoder, received {type(model).__name__}.")
    check_sizes(batch_size=batch_size)
    pooler = _pooler_of(model, pooling, normalize)
    features = model.features if isinstance(model, Decoder) else model

    def vectors(tokens: Any, mask: Any) -> Array:
        return pooler(features(tokens, padding_mask=mask), mask)

    if isinstance(tokens, Array | np.ndarray):
        return vectors(tokens, padding_mask)
    if padding_mask is not None:
        raise ValueError(
            "padding_mask: expected None with lists of tokens, received one; their lengths say it."
        )
    rows = rows_of(tokens, "tokens")
    if [] in rows:
        raise ValueError(
            f"tokens: expected at least one token in each text, received none in tokens[{rows.index([])}]; give it some text."
        )
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    found = []
    for at in range(0, len(order), batch_size):
        batch = [rows[index] for index in order[at : at + batch_size]]
        found.append(vectors(*_padded(batch, batch_size))[: len(batch)])
    return jnp.concatenate(found)[np.argsort(order)]


def _pooler_of(model: Any, pooling: str | None, normalize: bool | None) -> Pooler:
    """That of the model, or the usual one of its kind, with these options in the place of its own."""
    own = model.pooler or Pooler("last" if isinstance(model, Decoder) else "mean")
    if pooling is None and normalize is None:
        return own
    return Pooler(pooling or own.pooling, own.normalize if normalize is None else normalize, own.layers)


def _padded(batch: list[list[int]], most: int) -> tuple[Array, Array]:
    """Tokens and whether each is real, `[N, T]`, of few different shapes. What is added to the texts is the last one again."""
    count = min(1 << (len(batch) - 1).bit_length(), most)
    batch = [*batch, *[batch[-1]] * (count - len(batch))]
    tokens = np.zeros((count, in_few_sizes(len(batch[0]), 8)), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, text in enumerate(batch):
        tokens[row, : len(text)], mask[row, : len(text)] = text, True
    return jnp.asarray(tokens), jnp.asarray(mask)
