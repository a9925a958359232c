"""LoRA: low-rank updates of frozen weights (Hu et al. 2021, arXiv:2106.09685): $W x + (\\alpha / r) B A x$.

    python examples/lora.py --model Qwen3-0.6B --quantise int4

is `train_lm.py` with `--lora 16`, here beside weights of 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "in_proj_qkvz", "out_proj", "qkv_proj")
PROJECTIONS += ("gate_proj", "up_proj", "down_proj")


class LoRA(eqx.Module):
    """Replaces an `equinox.nn.Linear`. Only `a` and `b` are trained; initially the output equals that of `base`."""

    base: eqx.nn.Linear
    a: Array  # [R, in]
    b: Array  # [out, R]
    scale: float = eqx.field(static=True)

    def __init__(self, base: eqx.nn.Linear, rank: int, *, alpha: float = 16.0, key: Array):
        # Stacked layers have leading axes.
        *lead, out, features = base.weight.shape
        self.base = base
        self.a = (jax.random.normal(key, (*lead, rank, features)) / rank).astype(base.weight.dtype)
        self.b = jnp.zeros((*lead, out, rank), base.weight.dtype)
        self.scale = alpha / rank

    def __call__(self, x: Array) -> Array:
        base, a, b = jax.tree.map(
            lambda w: w.astype(x.dtype), (self.base, self.a, self.b), is_leaf=_is_quantised
        )
        return base(x) + self.scale * (b @ (a @ x))

    def merged(self) -> eqx.nn.Linear:
        """Merges the update into a single projection, for serving."""
        weight = ejx.dequantise(self.base.weight)
        return eqx.tree_at(
            lambda m: m.weight, self.base, weight + self.scale * self.b @ self.a, is_leaf=_is_quantised
        )


def _is_quantised(node: Any) -> bool:
    return isinstance(node, ejx.QuantizedWeight)


def _is_lora(node: Any) -> bool:
    return isinstance(node, LoRA)


def add_lora(model: ejx.models.Decoder, rank: int, *, key: Array) -> ejx.models.Decoder:
    """Returns the model with low-rank updates added to the projections of its mixers and MLPs."""
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree_util.tree_leaves_with_path(model.stacks, is_leaf=is_linear)
    count = len(found)

    def update(path: Any, node: Any) -> Any:
        if not is_linear(node) or getattr(path[-1], "name", None) not in PROJECTIONS:
            return node
        return LoRA(node, rank, key=next(keys))

    keys = iter(jax.random.split(key, count))
    stacks = jax.tree_util.tree_map_with_path(update, model.stacks, is_leaf=is_linear)
    return eqx.tree_at(lambda m: m.stacks, model, stacks)


def merge_lora(model: ejx.models.Decoder) -> ejx.models.Decoder:
    """Returns the model in its published form, with the updates merged into its weights."""
    return jax.tree.map(lambda node: node.merged() if _is_lora(node) else node, model, is_leaf=_is_lora)


def trained(model: Any) -> Any:
    """True for every array that is trained: the updates if there are any, otherwise all floating-point arrays."""
    if not any(map(_is_lora, jax.tree.leaves(model, is_leaf=_is_lora))):
        return jax.tree.map(eqx.is_inexact_array, model)
    nothing = lambda node: jax.tree.map(lambda _: False, node)
    updates = lambda node: eqx.tree_at(lambda m: (m.a, m.b), nothing(node), (True, True))
    return jax.tree.map(lambda node: updates(node) if _is_lora(node) else False, model, is_leaf=_is_lora)


if __name__ == "__main__":
    from train_lm import main

    sys.exit(main(["--lora", "16", *sys.argv[1:]]))
