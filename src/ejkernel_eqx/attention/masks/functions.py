"""Masks as functions `f(head, query, key) -> bool` of one pair, traced by JAX: a query is its position among the keys.

Those of named patterns are compared by value, so that equal masks share one compilation. The functions of a user are compared by identity.
"""

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from ..._jitted import while_alive

PairFunction = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Window:
    """`left` keys before and `right` keys after the query; `None` is unbounded."""

    left: int | None
    right: int | None

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        seen = jnp.bool_(True)
        if self.left is not None:
            seen = seen & (key >= query - self.left)
        if self.right is not None:
            seen = seen & (key <= query + self.right)
        return seen


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Keys in the query's own chunk of positions."""

    size: int

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size


@dataclasses.dataclass(frozen=True)
class Stride:
    """Keys at a multiple of `stride` from the query."""

    stride: int

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclasses.dataclass(frozen=True)
class Global:
    """The first `count` tokens see all keys and are seen by all queries."""

    count: int

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        return (query < self.count) | (key < self.count)


@dataclasses.dataclass(frozen=True)
class BlockTable:
    """A map `[H or 1, query blocks, key blocks]` of blocks of `size` queries by keys, the first query being at position `offset`."""

    table: np.ndarray = dataclasses.field(compare=False)
    size: tuple[int, int]
    offset: int = 0
    digest: tuple[Any, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        digest = hashlib.sha256(np.packbits(self.table).tobytes()).hexdigest()
        object.__setattr__(self, "digest", (self.table.shape, digest))

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        row = head if self.table.shape[0] > 1 else np.int32(0)
        # Not negative, so that truncation is the same as rounding down.
        block = jax.lax.div(query - self.offset, np.int32(self.size[0]))
        return jax.lax.dynamic_slice(
            jnp.asarray(self.table), (row, block, jax.lax.div(key, np.int32(self.size[1]))), (1, 1, 1)
        )[0, 0, 0]


@dataclasses.dataclass(frozen=True)
class Combined:
    """Functions as one: intersection (`&`), union (`|`), or the complement of their union (`~`)."""

    how: str
    functions: tuple[PairFunction, ...]

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        seen = (f(head, query, key) for f in self.functions)
        if self.how == "&":
            return functools.reduce(operator.and_, seen)
        union = functools.reduce(operator.or_, seen)
        return ~union if self.how == "~" else union


def intersection(functions: tuple[PairFunction, ...]) -> PairFunction:
    return functions[0] if len(functions) == 1 else Combined("&", functions)


def traced(function: PairFunction) -> Any:
    """The function as a closed jaxpr of three int32 scalars; `ValueError` if it does not return one boolean."""
    pair = [jax.ShapeDtypeStruct((), jnp.int32)] * 3
    try:
        jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*pair)
    except jax.errors.TracerBoolConversionError as error:
        raise ValueError(
            "f: expected a function that can be traced, received one that asks whether a traced value is true; use &, | and ~ in place of "
            "and, or and not, and jnp.where in place of if."
        ) from error
    leaves = jax.tree.leaves(result)
    if len(leaves) != 1 or leaves[0].shape != () or leaves[0].dtype != jnp.bool_:
        found = ", ".join(f"{x.dtype} {x.shape}" for x in leaves) or "nothing"
        raise ValueError(
            f"f: expected one boolean for each (head, query, key), received {found}; return a comparison of the three numbers."
        )
    return jaxpr


def interpreted(
    jaxpr: Any, consts: Iterable[Any], arguments: Iterable[Any], apply: Callable[..., Any], literal: Any
) -> list[Any]:
    """The results of a jaxpr whose operations are those of `apply(equation, operands)`, numbers in it being `literal` of them."""
    known: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= zip(jaxpr.constvars, consts, strict=True)
    read = lambda x: literal(x.val) if hasattr(x, "val") else known[x]
    for equation in jaxpr.eqns:
        results = apply(equation, [read(x) for x in equation.invars])
        known |= zip(equation.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars]


@while_alive
def is_static(function: PairFunction) -> bool:
    """Tells whether all that the function closes over is known now."""
    return not any(isinstance(x, Tracer) for x in traced(function).consts)


def depends_on_head(jaxpr: Any) -> bool:
    """Tells whether a traced function reads its first argument."""
    head = jaxpr.jaxpr.invars[0]
    return any(head is x for eqn in jaxpr.jaxpr.eqns for x in eqn.invars)


def evaluate(function: PairFunction, heads: Array, queries: Array, keys: Array) -> Array:
    """The function of every pair: booleans `[n, T, S]` from numbers `[n]`, `[T]` and `[S]`."""
    over_keys = jax.vmap(function, (None, None, 0))
    over_queries = jax.vmap(over_keys, (None, 0, None))
    return jax.vmap(over_queries, (0, None, None))(heads, queries, keys)
