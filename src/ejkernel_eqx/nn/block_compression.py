"""`BlockCompression`: the learned compression of blocks of keys or values of native sparse attention."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from .._jitted import compiled_call
from .._shapes import AnyArray, Float, Int
from .._signatures import Module
from ..core.arguments import wide
from ..native_sparse import blocks
from ..parallel import Leading, over_mesh
from .arguments import check_divides, checked, read_array
from .initial import normal
from .parts import Parts


class BlockCompression(Module):
    r"""Makes one key (or value) for each block of $l$ tokens, every $d$ tokens, head by head. It is made from the
    tokens' keys and a learned embedding of their place in the block:

    $$\tilde k_c = \varphi\big([k_{cd} + e_0, \dots, k_{cd + l - 1} + e_{l-1}]\big),\qquad
      \varphi(u) = u W \quad\text{or}\quad \max(u W + b, 0)\, W_2 + b_2$$

    (Yuan et al. 2025, arXiv:2502.11089, equation 7, whose text says an MLP with an encoding of places inside the block, and no more.)
    """

    positions: Array  # [K, l, D]
    weight: Array  # [K, l * D, D]; of an MLP [K, l * D, F]
    bias: Array | None  # [K, F]
    out_weight: Array | None  # [K, F, D]
    out_bias: Array | None  # [K, D]
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    @checked
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        size: int,
        stride: int,
        hidden_dim: int | None = None,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `num_heads`, `head_dim`: `K` heads of `D` features.
        - `size`, `stride`: $l$ and $d$; the stride divides the size.
        - `hidden_dim`: features `F` between the two products of an MLP for each head; default a single product.
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `key`: PRNG key for the initial weights.
        """
        check_divides("stride", stride, "size", size)
        parts = Parts(key, 5, dtype, None)
        drawn = lambda features, *shape: parts.uniform((num_heads, *shape), features**-0.5)
        width = size * head_dim
        self.positions = normal(parts.key(), (num_heads, size, head_dim), parts.dtype, 0.02)
        self.weight = drawn(width, width, head_dim if hidden_dim is None else hidden_dim)
        self.bias = self.out_weight = self.out_bias = None
        if hidden_dim is not None:
            self.bias = drawn(width, hidden_dim)
            self.out_weight = drawn(hidden_dim, hidden_dim, head_dim)
            self.out_bias = drawn(hidden_dim, head_dim)
        self.num_heads, self.head_dim, self.size, self.stride = num_heads, head_dim, size, stride

    @compiled_call("ejx.nn.BlockCompression")
    def __call__(
        self, x: Float[AnyArray, "*B T K D"], begin: Int[AnyArray, "... C"] | None = None
    ) -> Float[Array, "*B C K D"]:
        """**Arguments:**

        - `x`: keys or values `[..., T, K, D]` with any number of leading axes.
        - `begin`: the first token of each block, ints `[C]` or `[..., C]`, one from `T` on for none; default every `stride` tokens.

        **Returns:** `[..., C, K, D]` in the dtype of `x`, to which the weights are cast; without `begin`, `C = (T - size) // stride + 1`, at least
        1. Blocks that are not complete are undefined. Raises `ValueError` for another shape of `x`.
        """
        x = read_array("x", x, "floats", "[..., T, K, D]")
        num_heads = self.weight.shape[0]  # of one device, where devices have some each
        if x.ndim < 3 or x.shape[-2:] != (num_heads, self.head_dim):
            raise ValueError(
                f"x: expected [..., T, K, D] with K = {num_heads} and D = {self.head_dim}, received shape {x.shape}; split the features "
                "into heads first."
            )
        heads, names = f"H{num_heads}", ("positions", "weight", "bias", "out_weight", "out_bias")
        weights = {name: a for name in names if (a := getattr(self, name)) is not None}
        axes = {"x": ("T", heads, "D"), "begin": ("C",), "positions": (heads, "L", "D")}
        axes |= {"weight": (heads, "I", "F"), "bias": (heads, "F")}
        axes |= {"out_weight": (heads, "F", "D"), "out_bias": (heads, "D"), "out": ("C", heads, "D")}
        given = {"x": x} | ({} if begin is None else {"begin": jnp.asarray(begin)})
        shared = names if begin is not None and begin.ndim > 1 else (*names, "begin")
        leading = Leading(axes=axes, shared=frozenset(shared))
        return over_mesh(self._compressed, given | weights, leading)["out"]

    def _compressed(self, given: Any) -> dict[str, Array]:
        x, weight = given["x"], lambda name: given[name].astype(given["x"].dtype)
        tokens = blocks.tokens_of(x, self.size, self.stride, given.get("begin"))  # [..., C, l, K, D]
        tokens = jnp.swapaxes(tokens, -3, -2)
        tokens = _plus(tokens, weight("positions"))
        flat = tokens.reshape(*tokens.shape[:-2], -1)  # [..., C, K, l * D]
        out = jnp.einsum("...ki,kio->...ko", flat, weight("weight"))
        if "bias" in given:
            hidden = jax.nn.relu(_plus(out, weight("bias")))
            out = jnp.einsum("...ki,kio->...ko", hidden, weight("out_weight"))
            out = _plus(out, weight("out_bias"))
        return {"out": out}


def _plus(x: Array, shared: Array) -> Array:
    """The sum, in the dtype of `x`. The gradient of what all blocks share, a sum over them, is taken in float32."""
    return (wide(x) + like(wide(shared), x)).astype(x.dtype)


Compression = Literal["linear", "mlp", "mean"]
