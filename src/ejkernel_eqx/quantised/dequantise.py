"""Floats of quantised weights, alone or in a model."""

from typing import Any

import jax

from .weight import QuantizedWeight


def is_quantised(x: Any) -> bool:
    """Returns whether a node of a tree is a quantised weight."""
    return isinstance(x, QuantizedWeight)


def dequantise(tree: Any) -> Any:
    """Replaces each [`ejkernel_eqx.QuantizedWeight`][] by the array that it stands for.

    **Arguments:** `tree`: a quantised weight, or a model or any other pytree that holds some.

    **Returns:** an array, or a tree of the same structure. Other leaves are kept.
    """
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_quantised(x) else x, tree, is_leaf=is_quantised)
