"""`Teacher`: the distributions that a model is to learn from another one, in one of three forms."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._shapes import AnyArray, Float, Int
from .._signatures import Module
from ..core.arguments import array, fitting, read_array
from .checks import check_shape, read_soft_cap


class Teacher(Module):
    """A distribution over the vocabulary for each token, of a teacher that is not trained: no gradient reaches it."""

    arrays: dict[str, Array]  # by the names of `LossArrays`
    soft_cap: float | None = eqx.field(static=True, default=None)

    @classmethod
    def from_logits(cls, logits: Float[AnyArray, "*B V"]) -> "Teacher":
        """Logits `[..., V]`, after any soft cap, or log-probabilities, which are logits, too. The temperature of the loss divides them."""
        return cls({"teacher_logits": array("logits", logits, "V")})

    @classmethod
    def from_top_k(cls, indices: Int[AnyArray, "*B K"], log_probs: Float[AnyArray, "*B K"]) -> "Teacher":
        """The `K` words that the teacher finds most probable, different ones. All others have a probability of 0, so `reverse_kl`, which would be
        infinite, is refused.

        **Arguments:**

        - `indices`: integers `[..., K]`; words outside of the vocabulary, such as -1, are left out.
        - `log_probs`: `[..., K]`, at the temperature of the loss, taken as they are. `jax.nn.log_softmax` of them, or of the teacher's logits over
            its temperature, gives the `K` words all of the probability.
        """
        log_probs = array("log_probs", log_probs, "K")
        indices = read_array("indices", indices, "integers", "[..., K]").astype(jnp.int32)
        check_shape("indices", indices, log_probs.shape, "log_probs")
        return cls({"teacher_indices": indices, "teacher_log_probs": log_probs})

    @classmethod
    def from_features(
        cls,
        x: Float[AnyArray, "*B F"],
        weight: Float[AnyArray, "V F"],
        bias: Float[AnyArray, " V"] | None = None,
        *,
        logits_soft_cap: float | None = None,
    ) -> "Teacher":
        """Features `[..., F]`, which a head of the teacher's own, `[V, F]` and `[V]`, projects to logits for a chunk of tokens at a time."""
        x = array("x", x, "F")
        weight = fitting("weight", weight, (None, x.shape[-1]), "V F")
        arrays = {"teacher_x": x, "teacher_weight": weight}
        if bias is not None:
            arrays["teacher_bias"] = fitting("bias", bias, (len(weight),), "V")
        return cls(arrays, read_soft_cap(logits_soft_cap))
