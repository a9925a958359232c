"""Texts continued token by token, a batch of them at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._signatures import explained
from ..nn.arguments import is_known
from .decoder import Decoder
from .programs import read_call, run, warn_of_rows
from .sampling import Sampling
from .speculative import Speculation


class Generated(NamedTuple):
    """The result of [`generate`][ejkernel_eqx.models.generate]."""

    tokens: Array
    """Int32 `[..., max_new_tokens]`: the new tokens, a stop token included; -1 behind them, which is no token: `texts` leaves it out, and a model
    that is called with these tokens needs `padding_mask=tokens >= 0`."""
    lengths: Array
    """Int32 `[...]`: how many there are."""
    finite: Array
    """Bool `[...]`: False where the model gave NaN or infinite logits. Such a row ends before that token."""

    def texts(self) -> list[list[int]]:
        """The new tokens of each row, as lists."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths).reshape(-1)
        return [row[:n].tolist() for row, n in zip(tokens.reshape(lengths.size, -1), lengths)]


@explained(sampling=Sampling, speculate=Speculation)
def generate(
    model: Decoder,
    prompts: Array | np.ndarray | Sequence[Sequence[int] | Array | np.ndarray],
    *,
    max_new_tokens: int,
    padding_mask: Array | None = None,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_dtype: DTypeLike | None = None,
    key: Array | None = None,
    progress: Callable[[int, int], Any] | None = None,
    speculate: Speculation | None = None,
) -> Generated:
    """Continues prompts: each is read in one pass, then written to token by token from the caches, until it emits a stop token or
    `max_new_tokens` are reached. [`stream`][ejkernel_eqx.models.stream] gives out tokens as they come.

    Few lengths are compiled. Prompts are padded to a power of two or a multiple of 64 tokens, which one program reads. Another writes, the same for
    all prompts and numbers of new tokens that fit in caches of one size: 256 tokens, 512, 768, 1,024, 1,536 and so on, and on a CPU multiples of 64.

    **Arguments:**

    - `model`: a [`Decoder`][ejkernel_eqx.models.Decoder].
    - `prompts`: integers `[..., T]`; or a list with a list or array of tokens for each prompt, of any lengths, which are padded on the left.
    - `max_new_tokens`: the maximum number of new tokens per row.
    - `padding_mask`: bool `[..., T]`, True for real tokens, side by side in each row; for an array of prompts of unequal lengths.
    - `sampling`: a [`Sampling`][ejkernel_eqx.models.Sampling]; default greedy. Each row draws by itself: row 0 with the seed of
        `sampling`, and others with seeds that follow from it.
    - `stop_tokens`: tokens that end a row; default those of `model.config`.
    - `cache_dtype`: of keys and values, by default what the layers compute in.
    - `key`: a PRNG key, in place of the seed; only with a temperature above 0.
    - `progress`: called on the host as `progress(tokens, max_new_tokens)`, with how many tokens the longest row has so far: after the prompt, then
        after every 16 steps, and at the end. The device goes on meanwhile. Not inside `jit`.
    - `speculate`: a [`Speculation`][ejkernel_eqx.models.Speculation], whose drafts make steps of several tokens; without one, a step is one token.
        The tokens are the same.

    **Returns:** a `Generated`, the tokens and how many there are in each row. A row whose logits are not finite ends there and is reported: in
    `finite`, and outside `jit` by a `RuntimeWarning`.

    **Raises:** `ValueError` for an empty prompt, tokens that the model does not have, or arguments that do not fit.
    """
    call = read_call(model, prompts, max_new_tokens, padding_mask, sampling, stop_tokens, key, speculate)
    _check_progress(progress, call.is_known)
    tell = None if progress is None else lambda count: progress(count, max_new_tokens)
    new, lengths, finite = run(call, cache_dtype, tell, _TURNS)
    if is_known(finite):
        warn_of_rows("generate", np.asarray(finite), callers=3)
    new, lead = _first(new, max_new_tokens), call.lead
    return Generated(new.reshape(*lead, max_new_tokens), lengths.reshape(lead), finite.reshape(lead))


# After so many steps the host hears of them.
_TURNS = 16


def _check_progress(progress: Any, known: bool) -> None:
    if progress is None:
        return
    if not callable(progress):
        raise ValueError(
            f"progress: expected a function of two integers, received {progress!r}; progress=print is one."
        )
    if not known:
        raise ValueError(
            "progress: expected None for arrays that the host cannot read, as inside jit, received a function; leave it out there."
        )


def _first(new: Array, count: int) -> Array:
    """The first columns. Without a program for each number of them where one device has them all."""
    if not is_known(new) or len(new.sharding.device_set) > 1:
        return new[:, :count]
    return jax.device_put(np.asarray(new)[:, :count], new.sharding)
