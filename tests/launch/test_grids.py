"""Only the first axis of a GPU's grid goes past 65,535, and a launch that does not fit raises: more sequences and more tokens than that, in the
forward and the backward pass of every family. Nothing is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.operations import OPERATIONS, T

pytest.importorskip("triton")

MANY, LONG = 70_000, 2**21 + 64
SIZES = [
    pytest.param(
        name, *size, id=f"{name}, {size}", marks=pytest.mark.slow if name == "sparse" and size[0] == 1 else ()
    )
    for name in OPERATIONS
    for size in ((MANY, T), (1, 2**15 if name == "sparse" else LONG))
]


def check(call: Any, *args: Any) -> None:
    assert "ejkernel_interpret" in str(jax.make_jaxpr(call)(*args)), "no kernel was launched"


@pytest.mark.parametrize("name, batch, length", SIZES)
def test_operations(name, batch, length):
    build, own, shared = OPERATIONS[name]
    op = build(platform="triton-interpret")

    def struct(entry, *lead):
        shape = entry[0] if callable(entry[-1]) else entry
        if lead and shape[0] == T:
            shape = (length, *shape[1:])
        return jax.ShapeDtypeStruct((*lead, *shape), jnp.bfloat16)

    def both(own, shared):
        out, pull = jax.vjp(lambda own, shared: op(*own, *shared), own, shared)
        return pull(out)

    check(both, [struct(entry, batch) for entry in own], [struct(entry) for entry in shared])


@pytest.mark.parametrize("step", [True, False], ids=["decoding", "chunks"])
def test_pages(step):
    """Their attention and what is written to them."""
    op = ejx.RaggedPagedAttention(append=True, platform="triton-interpret")
    new = MANY if step else 3 * MANY
    shape = lambda *x, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(x, dtype)
    cache = jax.eval_shape(lambda: ejx.PagedKVCache.init(MANY, 16, 2, 16, dtype=jnp.bfloat16))

    def call(q, k, cache, table, lengths, starts):
        return op(
            q, cache.bind(table, lengths), k, k, query_start_loc=starts, max_query_len=1 if step else 40
        )

    table, lengths, starts = ([*x, jnp.int32] for x in ((MANY, 2), (MANY,), (MANY + 1,)))
    integers = [shape(*x[:-1], dtype=x[-1]) for x in (table, lengths, starts)]
    check(call, shape(new, 4, 16), shape(new, 2, 16), cache, *integers)


def test_groups():
    """Of a grouped matmul: many groups and many rows."""
    op = ejx.GroupedMatmul(platform="triton-interpret")
    shape = lambda *x, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(x, dtype)

    def both(x, w, sizes):
        out, pull = jax.vjp(lambda x, w: op(x, w, sizes), x, w)
        return pull(out)

    for rows, groups, width in ((LONG, 3, 16), (MANY, 1023, 16), (64, 2, LONG)):
        check(both, shape(rows, 16), shape(groups, 16, width), shape(groups, dtype=jnp.int32))


def test_steps():
    """One token of many sequences, whose states are in a pool."""
    shape = lambda *x, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((MANY, *x), dtype)
    slots, wide = shape(dtype=jnp.int32), jnp.float32
    state = shape(2, 16, 16, dtype=wide)
    options: Any = {"platform": "triton-interpret"}
    key, number = shape(2, 16), shape(2)
    delta, scan = ejx.GatedDeltaRule(**options), ejx.StateSpaceV1(**options)
    check(
        lambda *a: delta.step(*a[:-2], state=a[-2], state_indices=a[-1]),
        key,
        key,
        key,
        number,
        number,
        state,
        slots,
    )
    check(
        lambda x, dt, A, B, state, slots: scan.step(x, dt, A, B, B, state=state, state_indices=slots),
        shape(6), shape(6), jax.ShapeDtypeStruct((6, 4), wide), shape(4), shape(6, 4, dtype=wide), slots,
    )  # fmt: skip
