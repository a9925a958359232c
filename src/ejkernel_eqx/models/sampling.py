"""The choice of the next token from logits."""

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
    """The choice of the tokens of one text. Equal texts with equal seeds continue equally, whatever runs beside them. Of equal logits, that of the
    lower token counts as the likelier.

    **Arguments:**

    - `temperature`: what logits are divided by; 0 takes the most likely token, whatever the other options are.
    - `top_k`: only the `top_k` likeliest; 0 for all.
    - `top_p`: of these, the smallest set of the likeliest whose probability reaches `top_p` (Holtzman et al. 2020, arXiv:1904.09751).
    - `seed`: from 0 to $2^{32} - 1$.
    - `min_p`: of these, those with at least `min_p` times the probability of the likeliest (Nguyen et al. 2024, arXiv:2407.01082).

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
    """`Sampling`, and the position of the token that is chosen, for each row of a batch."""

    temperature: Any  # float32 [N]
    top_k: Any  # int32 [N]
    top_p: Any  # float32 [N]
    min_p: Any  # float32 [N]
    seed: Any  # uint32 [N]
    position: Any  # int32 [N]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sampling, int]], size: int) -> "SamplingArrays":
        """`rows`, each with its position, and, up to `size`, more that are greedy."""
        rows = [*rows, *[(Sampling(), 0)] * (size - len(rows))]
        kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}
        columns = {name: np.array([getattr(s, name) for s, _ in rows], kind) for name, kind in kinds.items()}
        # No vocabulary is larger than this: it stands for all.
        top_k = np.array([min(s.top_k, 2**31 - 1) for s, _ in rows], np.int32)
        return cls(**columns, top_k=top_k, position=np.array([position for _, position in rows], np.int32))


def sample(logits: Array, sampling: SamplingArrays) -> Array:
    """A token for each row of the float32 `logits [N, V]`, int32 `[N]`. A row's choice depends on nothing but the row."""
    # Greedy rows need no order of the whole vocabulary.
    any_drawn = jnp.any(jnp.asarray(sampling.temperature) > 0)
    return jax.lax.cond(any_drawn, lambda: draw(logits, sampling), lambda: greedy(logits))


def greedy(logits: Array) -> Array:
    """The likeliest token of each row: `sample` where every temperature is 0."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(logits: Array, sampling: SamplingArrays) -> Array:
    """Does what `sample` does, without a branch that the host would have to wait for."""
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
    """The tokens from the likeliest on, their logits over the temperature, and whether each may be drawn; `[V]` each."""
    order = jnp.argsort(-logits)  # stable: the first of equals comes first, as with argmax
    ranked = logits[order]
    ranked = (ranked - ranked[0]) / jnp.maximum(temperature, 1e-6)
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    kept = (top_k <= 0) | (rank < top_k)
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    before = jnp.cumsum(mass) - mass
    # Whether what is in front has not reached top_p yet. Sums are rounded, so that 1 is a case of its own.
    kept = kept & ((before < top_p) | (rank == 0) | (top_p >= 1))
    return order, ranked, kept & (jnp.exp(ranked) >= min_p)
