"""`embed`: vectors of texts."""

from typing import Any

import jax
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
    """Makes a vector of each text, for search and comparison.

    ```python
    model = ejx.models.from_pretrained("all-MiniLM-L6-v2")
    vectors = ejx.models.embed(model, [[101, 7592, 102], [101, 2088, 999, 102]])
    ```

    The model computes the features of all tokens, and [`Pooler`][ejkernel_eqx.models.Pooler] makes one vector of them. `from_pretrained` reads the
    pooler from the files of sentence-transformers in the folder into `model.pooler`. Without these files, an encoder takes the mean over the tokens
    and a decoder the last token, and both divide the vector by its norm.

    Gradients reach the weights of the model.

    **Arguments:**

    - `model`: an `Encoder` or a `Decoder`.
    - `tokens`: a list of tokens for each text, of any lengths; or integers `[..., T]`. Use the model's own tokenizer, with the tokens that
        it adds at the beginning and the end.
    - `padding_mask`: with an array, bool `[..., T]`, True for real tokens, which must be side by side; default all.
    - `pooling`: `"mean"`, `"max"`, `"last"` or `"first"`, instead of the model's own.
    - `normalize`: whether vectors are divided by their Euclidean norm, instead of the model's own choice.
    - `batch_size`: with lists, the number of texts that go through the model at once. Texts of similar lengths go together. They are padded to few
        different lengths, so that few programs are compiled.

    **Returns:** float32 vectors `[..., E]`; with lists, `[N, E]`.

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
    """The pooler of the model, or the default one of its class, with these options instead of its own."""
    own = model.pooler or Pooler("last" if isinstance(model, Decoder) else "mean")
    if pooling is None and normalize is None:
        return own
    return Pooler(pooling or own.pooling, own.normalize if normalize is None else normalize, own.layers)


def _padded(batch: list[list[int]], most: int) -> tuple[Array, Array]:
    """Tokens and their mask, `[N, T]`, in one of few shapes. The last text is repeated to fill the batch."""
    count = min(1 << (len(batch) - 1).bit_length(), most)
    batch = [*batch, *[batch[-1]] * (count - len(batch))]
    tokens = np.zeros((count, in_few_sizes(len(batch[0]), 8)), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, text in enumerate(batch):
        tokens[row, : len(text)], mask[row, : len(text)] = text, True
    return jax.device_put((tokens, mask))
