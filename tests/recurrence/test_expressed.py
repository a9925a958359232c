"""Members of the literature that are inputs of an operation, as the guide to recurrences says: values and all gradients of the plain recurrence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("enable_x64")
T, H, D, V = 13, 2, 4, 3


def token_by_token(update: Any, q: Any, *tokens: Any) -> Any:
    """The outputs `[T, H, V]` and the last state, where `update(state, *token)` is the state `[H, D, V]` after a token."""

    def token(state, x):
        state = update(state, *x[1:])
        return state, jnp.einsum("hdv,hd->hv", state, x[0]) / D**0.5

    state, out = jax.lax.scan(token, jnp.zeros((H, D, V)), (q, *tokens))
    return out, state


def erased_and_written(state, k, v, g, erase, write):
    """Gated DeltaNet-2 (Hatamizadeh et al., 2026): the state that a gated key reads is taken away, and a gated value is written."""
    state = jnp.exp(g)[..., None] * state
    read = jnp.einsum("hdv,hd->hv", state, erase * k)
    return state + k[..., None] * (write * v - read)[:, None]


def fed_back(state, k, v, p, g, beta):
    """Comba (Hu et al., 2025): what `p` reads before the decay is subtracted from the value."""
    read = jnp.einsum("hdv,hd->hv", state, p)
    written = beta[:, None] * (v - read)
    return jnp.exp(g)[:, None, None] * state + k[..., None] * written[:, None]


def comba(q, k, v, p, g, beta):
    strength = beta[..., None]
    g = jnp.broadcast_to(g[..., None], k.shape)
    return ejx.DPLRDeltaRule()(q, strength * k, v, p, -strength * k, g)


def arrays_of(*sizes: tuple[int, ...]) -> list[jax.Array]:
    """Queries, keys of length 1 and values, and others of these sizes."""
    random = np.random.default_rng(0)
    q, k, v, *others = (
        jnp.asarray(random.normal(size=(T, *size))) for size in ((H, D), (H, D), (H, V), *sizes)
    )
    return [q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, *others]


def gated_delta_net_2() -> Any:
    q, k, v, g, erase, write = arrays_of((H, D), (H, D), (H, V))
    ours = lambda q, k, v, g, e, w: ejx.DPLRDeltaRule()(q, k, w * v, jnp.exp(g) * e * k, -k, g)
    plain = lambda *arrays: token_by_token(erased_and_written, *arrays)
    return ours, plain, (q, k, v, -jnp.abs(g), jax.nn.sigmoid(erase), jax.nn.sigmoid(write))


def comba_with_both_corrections() -> Any:
    q, k, v, g, beta = arrays_of((H,), (H,))
    plain = lambda *arrays: token_by_token(fed_back, *arrays)
    return comba, plain, (q - 0.02 * k, k, v, 0.9 * k, -jnp.abs(g), jax.nn.sigmoid(beta))


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [gated_delta_net_2, comba_with_both_corrections])
def test_a_member_is_an_input(make):
    ours, plain, arrays = make()
    random = np.random.default_rng(1)
    pulled = jnp.asarray(random.normal(size=(T, H, V))), jnp.asarray(random.normal(size=(H, D, V)))

    def results(function: Any) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, pull(pulled)

    (found, gradients), (expected, wanted) = (quick(results, static_argnums=0)(f) for f in (ours, plain))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)
    for x, y in zip(gradients, wanted, strict=True):
        assert_close(x, y, kind="gradient")
