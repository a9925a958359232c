"""LoRA: low-rank updates of frozen weights (Hu et al. 2021, arXiv:2106.09685): $W x + (\\alpha / r) B A x$."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._signatures import Module
from ..nn.arguments import read_sizes
from ..nn.projection import product, project
from ..quantised.dequantise import dequantise, is_quantised
from ..weights.fill import replaced
from .decoder import Decoder

M = TypeVar("M")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "in_proj_qkvz", "out_proj", "qkv_proj")
PROJECTIONS += ("gate_proj", "up_proj", "down_proj")


class LoRA(Module):
    r"""A linear layer with a low-rank update beside its frozen weight. It replaces an `equinox.nn.Linear`:

    $$y = W x + \frac{\alpha}{R}\, B A x$$

    Only `a`, the matrix $A$ `[R, in]`, and `b`, the matrix $B$ `[out, R]`, are trained. At first $B = 0$, so the output is that of `base`.

    Source: Hu et al., *LoRA* (2021, arXiv:2106.09685).

    **Arguments:**

    - `base`: the linear layer. Its weight may be an [`ejkernel_eqx.QuantizedWeight`][] and may have leading axes.
    - `rank`: $R$.
    - `alpha`: $\alpha$.
    - `key`: a PRNG key for $A$.
    """

    base: eqx.nn.Linear
    a: Array  # [R, in]
    b: Array  # [out, R]
    scale: float = eqx.field(static=True)

    def __init__(self, base: eqx.nn.Linear, rank: int, *, alpha: float = 16.0, key: Array):
        if not isinstance(base, eqx.nn.Linear):
            raise ValueError(
                f"base: expected an equinox.nn.Linear, received {type(base).__name__}; replace its projections one by one."
            )
        (rank,) = read_sizes(rank=rank)
        # Stacked layers have leading axes.
        *lead, out, features = base.weight.shape
        self.base = base
        self.a = (jax.random.normal(key, (*lead, rank, features)) / rank).astype(base.weight.dtype)
        self.b = jnp.zeros((*lead, out, rank), base.weight.dtype)
        self.scale = float(alpha) / rank  # a number of NumPy would decide the dtype

    def __call__(self, x: Array) -> Array:
        base, a, b = jax.tree.map(
            lambda w: w.astype(x.dtype), (self.base, self.a, self.b), is_leaf=is_quantised
        )
        return base(x) + self.scale * (b @ (a @ x))

    def over_rows(self, name: str, x: Array, features: int) -> Array:
        """The outputs `[..., features]` of rows `x` `[..., in]`, on any mesh, as layers call their projections."""
        return project(name, self.base, x, features) + self.scale * product(product(x, self.a), self.b)

    def merged(self) -> eqx.nn.Linear:
        """Returns a plain linear layer with the weight $W + (\\alpha / R) B A$. A quantised weight becomes floats."""
        weight = dequantise(self.base.weight)
        return eqx.tree_at(
            lambda m: m.weight, self.base, weight + self.scale * self.b @ self.a, is_leaf=is_quantised
        )


def is_lora(node: Any) -> bool:
    return isinstance(node, LoRA)


def add_lora(model: Decoder, rank: int, *, alpha: float = 16.0, key: Array) -> Decoder:
    """Replaces each projection of the mixers and MLPs by a [`LoRA`][ejkernel_eqx.models.LoRA]. Experts, projections
    that only make gates, and those from and to the latents of latent attention stay as they are.

    **Arguments:**

    - `model`: a [`Decoder`][ejkernel_eqx.models.Decoder].
    - `rank`: the rank of each update, $R$.
    - `alpha`: $\\alpha$. An update is multiplied by $\\alpha / R$.
    - `key`: a PRNG key for the updates.

    **Returns:** the new model.

    **Raises:** `ValueError` for a model that is no `Decoder` or has updates already, and for a rank below 1.
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"model: expected a Decoder, received {type(model).__name__}; ejx.models.LoRA replaces one projection of any model."
        )
    if any(map(is_lora, jax.tree.leaves(model, is_leaf=is_lora))):
        raise ValueError(
            "model: expected a Decoder without updates, received one with LoRA; merge_lora(model) adds its updates to the weights first."
        )
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    parts = {"stacks": model.stacks, "shared_blocks": model.shared_blocks}
    found = jax.tree_util.tree_leaves_with_path(parts, is_leaf=is_linear)
    count = len(found)

    def update(path: Any, node: Any) -> Any:
        if not is_linear(node) or getattr(path[-1], "name", None) not in PROJECTIONS:
            return node
        return LoRA(node, rank, alpha=alpha, key=next(keys))

    keys = iter(jax.random.split(key, count))
    return replaced(model, jax.tree_util.tree_map_with_path(update, parts, is_leaf=is_linear))


def merge_lora(model: M) -> M:
    """Adds the updates to the weights, for serving.

    **Returns:** the model with plain linear layers. Quantised weights that had an update are floats.
    """
    return jax.tree.map(lambda node: node.merged() if is_lora(node) else node, model, is_leaf=is_lora)


def trained(model: Any) -> Any:
    """A tree with True for each array that is trained: the updates if there are any, otherwise all floating-point arrays."""
    if not any(map(is_lora, jax.tree.leaves(model, is_leaf=is_lora))):
        return jax.tree.map(eqx.is_inexact_array, model)
    nothing = lambda node: jax.tree.map(lambda _: False, node)
    updates = lambda node: eqx.tree_at(lambda m: (m.a, m.b), nothing(node), (True, True))
    return jax.tree.map(lambda node: updates(node) if is_lora(node) else False, model, is_leaf=is_lora)
