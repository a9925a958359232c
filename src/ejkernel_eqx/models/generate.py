"""`generate`: continues a batch of texts token by token."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._signatures import explained
from ..nn.arguments import is_known
from .decoder import Decoder
from .programs import read_call, run, warn_of_rows
from .prompts import is_on_one_device
from .sampling import Sampling
from .speculative import Speculation


class Generated(NamedTuple):
    """The result of [`generate`][ejkernel_eqx.models.generate]."""

    tokens: Array
    """Int32 `[..., max_new_tokens]`: the new tokens, a stop token included. The rest of a row that ended early is -1, which is no token. `texts`
    leaves it out. A model that is called with these tokens needs `padding_mask=tokens >= 0`."""
    lengths: Array
    """Int32 `[...]`: the number of new tokens of each row."""
    finite: Array
    """Bool `[...]`: False where the model gave NaN or infinite logits. Such a row ends before that token."""

    def texts(self) -> list[list[int]]:
        """The new tokens of each row, as lists."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths).reshape(-1)
        return [row[:n].tolist() for row, n in zip(tokens.reshape(lengths.size, tokens.shape[-1]), lengths)]


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
    """Continues prompts. One pass reads them. Then each step generates a token of each row from the caches. A row ends with a stop token, or after
    `max_new_tokens`. [`stream`][ejkernel_eqx.models.stream] yields tokens as they come.

    Few programs are compiled. One reads prompts. There is one for each padded length, a power of two or a multiple of 64 tokens. Another generates.
    There is one for each capacity of the caches: 256 tokens, 512, 768, 1,024, 1,536 and so on; on a CPU, multiples of 64.

    **Arguments:**

    - `model`: a [`Decoder`][ejkernel_eqx.models.Decoder].
    - `prompts`: integers `[..., T]`; or a list with the tokens of each prompt, of any lengths.
    - `max_new_tokens`: the maximum number of new tokens per row.
    - `padding_mask`: for an array of prompts of unequal lengths, bool `[..., T]`, True for real tokens, which must be side by side in each row.
    - `sampling`: a [`Sampling`][ejkernel_eqx.models.Sampling]; default greedy. Row 0 draws with the seed of `sampling`. The other rows draw with
        seeds that are derived from it.
    - `stop_tokens`: tokens that end a row; default those of `model.config`.
    - `cache_dtype`: the dtype of cached keys and values; default that in which the layers compute.
    - `key`: a PRNG key, instead of the seed. Only with a temperature above 0.
    - `progress`: a function that the host calls as `progress(tokens, max_new_tokens)`, where `tokens` is the number of new tokens of the longest row.
        It is called after the prompt, after every 16 steps and at the end. The device goes on meanwhile. Not inside `jit`.
    - `speculate`: a [`Speculation`][ejkernel_eqx.models.Speculation]. A step then generates several tokens. The tokens are the same as without it.

    **Returns:** a `Generated`. A row whose logits are not finite ends there. Its `finite` is False, and outside `jit` there is a `RuntimeWarning`.

    **Raises:** `ValueError` for an empty prompt, tokens that the model does not have, or arguments that do not fit.
    """
    call = read_call(model, prompts, max_new_tokens, padding_mask, sampling, stop_tokens, key, speculate)
    _check_progress(progress, call.is_known)
    tell = None if progress is None else lambda count: progress(count, max_new_tokens)
    results = run(call, cache_dtype, tell, _TURNS)
    # The host cuts what one device has, which compiles no program for each number of columns.
    is_on_one = is_on_one_device(results[0])
    new, lengths, finite = jax.device_get(results) if is_on_one else results
    if is_known(finite):
        warn_of_rows("generate", np.asarray(finite), callers=3)
    lead, most = call.lead, max_new_tokens
    generated = Generated(new[:, :most].reshape(*lead, most), lengths.reshape(lead), finite.reshape(lead))
    if not is_on_one:
        return generated
    place = results[0].sharding
    if isinstance(place, NamedSharding):  # for arrays of any rank
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.device_put(generated, place)


# The host reads the number of tokens after so many steps.
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
