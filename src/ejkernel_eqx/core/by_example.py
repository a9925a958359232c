"""What platforms share whose kernels have a forward only: launches where `jax.vmap` maps arrays that a kernel knows without leading axes, and
gradients by XLA."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .kind import is_float


def by_example(
    forward: Callable[[Any], dict[str, Array]], arrays: Any, ranks: Mapping[str, int]
) -> dict[str, Array]:
    """`forward(arrays)`, whose results have exactly one leading axis, as the arrays have that are not in `ranks`. Those in it have these ranks, or
    one more where each example of the leading axis has its own: then `forward` is called for one example after the other."""
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    if all(x.ndim == ranks.get(name, x.ndim) for name, x in given.items()):
        return forward(arrays)

    def example(b: int) -> dict[str, Array]:
        one = lambda name, x: x[b : b + 1] if name not in ranks else x[b] if x.ndim > ranks[name] else x
        return forward(arrays._replace(**{name: one(name, x) for name, x in given.items()}))

    each = [example(b) for b in range(next(iter(given.values())).shape[0])]
    return {name: jnp.concatenate([results[name] for results in each]) for name in each[0]}


def gradients_by(apply: Callable[[Any, Any], dict[str, Array]]) -> Callable[..., dict[str, Array]]:
    """The `backward` of a platform whose gradients, of all floats of a call, are those of `apply(arrays, spec)`."""

    def backward(
        arrays: Any, spec: Any, config: Any, saved: Any, cotangents: Mapping[str, Array]
    ) -> dict[str, Array]:
        given = {name: x for name, x in arrays._asdict().items() if x is not None and is_float(x)}
        results, pull = jax.vjp(lambda given: apply(arrays._replace(**given), spec), given)
        return pull({name: cotangents[name].astype(x.dtype) for name, x in results.items()})[0]

    return backward
