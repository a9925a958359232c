"""What tests of many layers share: errors by their messages, decoding in pieces, kernels that need Triton."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def refuses(errors: Mapping[str, Any], call: Callable[[Any], Any] = lambda wrong: wrong()) -> Any:
    """A test for each message: `call` of what is beside it raises the error."""

    @pytest.mark.parametrize("message", errors)
    def test(message, unchecked):
        with pytest.raises(ValueError, match=message):
            call(errors[message])

    return test


@eqx.filter_jit
def step(layer: Any, x: Any, cache: Any) -> Any:
    return layer(x, cache)


def in_pieces(layer: Any, x: Any, counts: Iterable[int], cache: Any) -> tuple[Any, Any]:
    """The outputs for pieces of the rows `x [n, T, E]`, so many tokens each, and the last cache."""
    outputs, start = [], 0
    for count in counts:
        y, cache = step(layer, x[:, start : start + count], cache)
        outputs.append(y)
        start += count
    assert start == x.shape[1]
    return jnp.concatenate(outputs, 1), cache


def exact(tree: Any) -> Any:
    """The tree with its floats in float64, of NumPy."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64) if eqx.is_inexact_array(a) else a, tree)


def needs_triton(platform: str | None) -> None:
    if "triton" in str(platform):
        pytest.importorskip("triton")
