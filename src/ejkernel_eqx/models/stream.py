"""`stream`: continues texts and yields each token as soon as it is known."""

from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._signatures import explained
from ..nn.arguments import check_sizes
from .decoder import Decoder
from .programs import Call, read_call, step_by_step, warn_of_rows
from .sampling import Sampling


@explained(sampling=Sampling)
def stream(
    model: Decoder,
    prompts: Array | np.ndarray | Sequence[Sequence[int] | Array | np.ndarray],
    *,
    max_new_tokens: int,
    padding_mask: Array | None = None,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_dtype: DTypeLike | None = None,
    key: Array | None = None,
    steps_per_call: int = 1,
) -> Generator[np.ndarray, None, None]:
    """Continues prompts as [`generate`][ejkernel_eqx.models.generate] does, and yields the tokens of each step.

    ```python
    for tokens in ejx.models.stream(model, [[1, 2, 3]], max_new_tokens=100):
        print(tokens[0])
    ```

    The device runs ahead: it starts the next steps before the host reads a token, so it does not wait for the host. The prompts are read at the first
    `next`. Closing the iterator frees the caches.

    **Arguments:** those of `generate`, except `progress` and `speculate`, and

    - `steps_per_call`: the number of steps in one call of the device. Their tokens come together. Several steps save time if the host is slower than
        a step of the device. The time to compile grows with their number.

    **Returns:** an iterator of int32 arrays `[...]`: one token of each row, or -1 for rows that have ended. It ends when all rows have ended, at the
    latest after `max_new_tokens`. A row whose logits are not finite ends there, and a `RuntimeWarning` says so at the end.

    **Raises:** `ValueError`, as `generate`, and for arrays that the host cannot read, such as traced ones. The call raises it, not the first `next`.
    """
    check_sizes(steps_per_call=steps_per_call)
    call = read_call(model, prompts, max_new_tokens, padding_mask, sampling, stop_tokens, key)
    if not call.is_known:
        raise ValueError(
            "stream: expected arrays that the host can read, received traced ones, or some of other processes; use generate with these."
        )
    # A wrong dtype raises here, not at the first `next`.
    jax.eval_shape(lambda: model.init_cache(call.prompts.tokens.shape[0], call.capacity, cache_dtype))
    return _tokens(call, cache_dtype, steps_per_call)


def _tokens(call: Call, dtype: Any, steps_per_call: int) -> Generator[np.ndarray, None, None]:
    report = np.zeros(0, np.int32)
    for report in step_by_step(call, dtype, steps_per_call):
        for tokens in report[:-2]:
            # All rows may have ended before the last step of a call.
            if np.any(tokens >= 0):
                yield tokens.reshape(call.lead)
    warn_of_rows("stream", report[-1] & 2, callers=2)
