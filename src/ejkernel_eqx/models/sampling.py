"""Chooses the next token from logits."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._signatures import explained_options
from ..core.arguments import is_finite


def _is_number(value: Any, least: int | float, most: int | float) -> bool:
    return is_finite(value) and bool(least <= value <= most)


def _check_integer(name: str, value: Any, most: int | None, remedy: str) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < 0 or (most is not None and value > most):
        expected = "of at least 0" if most is None else f"from 0 to {most}"
        raise ValueError(f"{name}: expected an integer {expected}, received {value!r}{remedy}.")


@explained_options
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one text are drawn: from the softmax of the logits over the temperature, among the tokens that all options leave.

    A token depends on the text, the options and the seed only, not on other texts in the batch. If two logits are equal, the lower token counts as
    more likely.

    **Arguments:**

    - `temperature`: the divisor of the logits. 0 takes the most likely token, whatever the other options are.
    - `top_k`: keeps the `top_k` most likely tokens; 0 keeps all.
    - `top_p`: of these, keeps the most likely ones until their probabilities sum to `top_p` (Holtzman et al. 2020, arXiv:1904.09751).
    - `seed`: an integer from 0 to $2^{32} - 1$.
    - `min_p`: of these, keeps the tokens with at least `min_p` times the probability of the most likely one (Nguyen et al. 2024, arXiv:2407.01082).

    **Raises:** `ValueError` for numbers out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self):
        if not _is_number(self.temperature, 0, float(np.finfo(np.float32).max)):
            raise ValueError(
                f"temperature: expected a number from 0 to 3.4e38, received {self.temperature!r}; 0 takes the likeliest."
            )
        _check_integer("top_k", self.top_k, None, "; 0 stands for all")
        if not _is_number(self.top_p, 0, 1) or self.top_p == 0:
            raise ValueError(
                f"top_p: expected a number above 0 and up to 1, received {self.top_p!r}; 1 stands for all."
            )
        if not _is_number(self.min_p, 0, 1):
            raise ValueError(
                f"min_p: expected a number from 0 to 1, received {self.min_p!r}; 0 stands for all."
            )
        _check_integer("seed", self.seed, 2**32 - 1, "")


class SamplingArrays(NamedTuple):
    """The options of `Sampling` for each row of a batch, and the position of the token that is chosen."""

    temperature: Any  # float32 [N]
    top_k: Any  # int32 [N]
    top_p: Any  # float32 [N]
    min_p: Any  # float32 [N]
    seed: Any  # uint32 [N]
    position: Any  # int32 [N]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sampling, int]], size: int) -> "SamplingArrays":
        """Arrays of the rows, each with its position, padded with greedy rows to `size`."""
        rows = [*rows, *[(Sampling(), 0)] * (size - len(rows))]
        kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}
        columns = {name: np.array([getattr(s, name) for s, _ in rows], kind) for name, kind in kinds.items()}
        # No vocabulary is larger than this number, so it keeps all tokens.
        top_k = np.array([min(s.top_k, 2**31 - 1) for s, _ in rows], np.int32)
        return cls(**columns, top_k=top_k, position=np.array([position for _, position in rows], np.int32))


def sample(logits: Array, sampling: SamplingArrays) -> Array:
    """Chooses a token for each row of the float32 `logits [N, V]`. Returns int32 `[N]`. Rows do not affect each other."""
    # Greedy rows need no sorting of the vocabulary.
    any_drawn = jnp.any(jnp.asarray(sampling.temperature) > 0)
    return jax.lax.cond(any_drawn, lambda: draw(logits, sampling), lambda: greedy(logits))


def greedy(logits: Array) -> Array:
    """The most likely token of each row, as `sample` chooses where every temperature is 0."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(logits: Array, sampling: SamplingArrays) -> Array:
    """The same as `sample`, without a branch in the program."""
    return jax.vmap(_sample_row)(logits, sampling)


def _sample_row(logits: Array, sampling: SamplingArrays) -> Array:
    order, ranked, kept = candidates(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    key = jax.random.fold_in(jax.random.key(sampling.seed), sampling.position)
    drawn = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return order[jnp.where(sampling.temperature > 0, drawn, 0)].astype(jnp.int32)


def candidates(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array | float = 0.0
) -> tuple[Array, Array, Array]:
    """The tokens in the order of their probability, their logits over the temperature, and whether each may be drawn. Each is `[V]`."""
    order = jnp.argsort(-logits)  # stable: the first of equals comes first, as with argmax
    ranked = logits[order]
    ranked = (ranked - ranked[0]) / jnp.maximum(temperature, 1e-6)
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    kept = (top_k <= 0) | (rank < top_k)
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    before = jnp.cumsum(mass) - mass
    # A token is kept if those before it do not reach top_p. Sums are rounded, so top_p = 1 is a case of its own.
    kept = kept & ((before < top_p) | (rank == 0) | (top_p >= 1))
    return order, ranked, kept & (jnp.exp(ranked) >= min_p)
