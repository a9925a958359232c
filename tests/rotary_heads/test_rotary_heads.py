"""The rotation of heads on XLA and by its Triton kernel, interpreted: against the reference, and how it composes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import exact_results, Inputs
from ejkernel_eqx.rotary.heads.core import HEADS
from ejkernel_eqx.rotary.heads.spec import HeadsArrays, HeadsSpec, RESULTS
from tests.agreement import assert_agrees, platforms
from tests.arrays import array
from tests.attention.dense import quick
from tests.tolerances import assert_close

platform = platforms()


@dataclasses.dataclass(frozen=True)
class Case:
    lead: tuple[int, ...] = (2, 3)
    heads: tuple[int, int] = (5, 2)
    features: int = 10
    pairs: int = 5
    dtype: str = "float32"
    interleaved: bool = False
    norm: bool = True
    weight: bool = True


CASES = {
    "halves": Case(),
    "neighbours": Case((4,), (3, 3), 12, 6, "bfloat16", True),
    "part": Case((1, 2, 2), (4, 1), 14, 3, "float32", False, True, False),
    "part of neighbours": Case((5,), (1, 1), 9, 3, "float16", True, False, False),
    "without a norm": Case((3,), (2, 1), 8, 4, norm=False, weight=False),
}


def make(case: Case, seed: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """The arrays of a call, and cotangents of its results."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=case.dtype: array(rng.standard_normal(shape), dtype)
    q, k = (normal(*case.lead, heads, case.features) for heads in case.heads)
    angles = 3 * normal(*case.lead, case.pairs, dtype="float32")
    given = {"q": q, "k": k, "cos": jnp.cos(angles), "sin": jnp.sin(angles)}
    if case.weight:
        given |= {name: normal(case.features, dtype="float32") for name in ("q_norm", "k_norm")}
    return given, [normal(*x.shape) for x in (q, k)]


@functools.partial(quick, static_argnums=(0, 1))
def results(op: ejx.RotaryHeads, case: Case, given: Any, cotangents: Any) -> dict[str, Any]:
    eps = 1e-5 if case.norm else None
    outs, pull = jax.vjp(lambda given: op(**given, norm_eps=eps), given)
    return dict(zip(RESULTS, outs)) | {f"d{n}": x for n, x in pull(tuple(cotangents))[0].items()}


def exact(case: Case, given: Any, cotangents: Any) -> dict[str, Any]:
    """The same by the reference in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64), np.float64)
        spec = HeadsSpec(case.interleaved, 1e-5 if case.norm else None)
        inputs = Inputs(
            HeadsArrays(**{n: wide(x) for n, x in given.items()}), dict(zip(RESULTS, map(wide, cotangents)))
        )
        found = _reference(spec, inputs)
        return {name if name in RESULTS else f"d{name}": np.asarray(x) for name, x in found.items()}


_reference = functools.partial(quick, static_argnums=0)(functools.partial(exact_results, HEADS))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    given, cotangents = make(case)
    found = results(ejx.RotaryHeads(case.interleaved, platform=platform), case, given, cotangents)
    assert all(found[n].dtype == case.dtype for n in RESULTS)
    assert_agrees(case, found, exact(case, given, cotangents))


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_the_rotation_of_a_rotary_embedding(interleaved):
    """Angles that depend on positions, on rows and on lengths."""
    given, _ = make(Case(features=12))
    rope = ejx.nn.RotaryEmbedding(
        12, rotary_dim=8, interleaved=interleaved, scaling=ejx.nn.DynamicScaling(2.0, 2)
    )
    offset = jnp.array([3, 1000])
    cos, sin = rope.tables((2, 3), offset=offset)
    q, k = ejx.RotaryHeads(interleaved)(given["q"], given["k"], cos, sin)
    assert_close(q, rope(given["q"], offset=offset))
    assert_close(k, rope(given["k"], offset=offset))


@pytest.mark.few(1)
def test_composes(platform):
    """vmap of tokens and of weights, in a loop."""
    case = Case()
    given, _ = make(case)
    op = ejx.RotaryHeads(platform=platform)
    call = lambda given: op(**given, norm_eps=1e-5)
    wanted = quick(call)(given)
    axes = {name: None if "norm" in name else 0 for name in given}
    for found, x in zip(quick(jax.vmap(call, (axes,)))(given), wanted):
        assert_close(found, x)
    weights = {name: jnp.stack([x, -x]) if "norm" in name else x for name, x in given.items()}
    both = quick(jax.vmap(call, ({name: 0 if "norm" in name else None for name in given},)))(weights)
    for found, x in zip(both, wanted):
        assert_close(found[0], x)
        assert_close(found[1], -x)
    turn = lambda q, _: (call(given | {"q": q})[0], None)
    again = call(given | {"q": wanted[0]})[0]
    assert_close(quick(lambda q: jax.lax.scan(turn, q, None, 2)[0])(given["q"]), again)


Q = jnp.ones((3, 2, 8))


@pytest.mark.parametrize(
    "more, words",
    [
        (dict(k=Q[:2]), ["k", "(2, 2, 8)"]),
        (dict(k=Q.astype(jnp.bfloat16)), ["k", "bfloat16"]),
        (dict(cos=jnp.ones((3, 5))), ["cos", "at most 4", "received 5"]),
        (dict(sin=jnp.ones((3, 3))), ["sin", "expected the pairs of cos, 4", "received 3"]),
        (dict(sin=jnp.ones((2, 4))), ["sin", "(3, 4)", "(2, 4)"]),
        (dict(k=Q[:, :0]), ["q, k", "at least one head"]),
        (dict(q_norm=jnp.ones(8)), ["q_norm", "norm_eps"]),
        (dict(k_norm=jnp.ones(7), norm_eps=1e-5), ["k_norm", "(7,)"]),
        (dict(norm_eps=-1.0), ["norm_eps", "-1.0"]),
    ],
)
def test_errors(more, words):
    given = dict(q=Q, k=Q, cos=jnp.ones((3, 4)), sin=jnp.ones((3, 4))) | more
    with pytest.raises(ValueError) as error:
        ejx.RotaryHeads()(**given)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_an_empty_call_gives(platform):
    q, k = ejx.RotaryHeads(platform=platform)(Q[:0], Q[:0], jnp.ones((0, 4)), jnp.ones((0, 4)))
    assert q.shape == k.shape == (0, 2, 8)
