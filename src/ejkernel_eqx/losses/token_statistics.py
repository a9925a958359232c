"""`TokenStatistics`: what losses return of each token besides its loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TYPE_CHECKING

from jax import Array

from .._shapes import Bool, Float


class TokenStatistics(NamedTuple):
    r"""What one pass over the logits $l$ says of each token, `[...]`, with $p = \mathrm{softmax}(l)$; 0 and False for ignored tokens. All but the
    last are differentiable, in float32 (float64 for float64)."""

    log_probs: Float[Array, "*B"]
    r"""$\log p_y$ of the labels, in nats."""

    entropy: Float[Array, "*B"]
    r"""$-\sum_v p_v \log p_v$, in nats."""

    lse: Float[Array, "*B"]
    r"""$\log \sum_v e^{l_v}$."""

    is_top1: Bool[Array, "*B"]
    """Whether no word has a larger logit than the label."""

    @classmethod
    def of(cls, results: Mapping[str, Array], labels: Array, lead: tuple[int, ...]) -> "TokenStatistics":
        """From the `STATISTICS` of `spec.py`, for tokens with the axes `lead`."""
        names = ("log_probs", "entropy", "lse")
        is_top1 = (results["margin"] >= 0) & (labels >= 0)
        return cls(**{name: results[name].reshape(lead) for name in names}, is_top1=is_top1.reshape(lead))


if TYPE_CHECKING:
    LossAndMore = Any
else:
    LossAndMore = Float[Array, "..."] | tuple[Float[Array, "..."], TokenStatistics]
"""What a loss returns: with `return_statistics` a pair. A type checker does not know which."""
