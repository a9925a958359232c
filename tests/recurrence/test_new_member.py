"""A member of the family that the package does not know, written as its user would: no kernel file, only operands."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx.recurrence.arguments import Frame, frame_of, Operands, step_frame_of
from ejkernel_eqx.recurrence.operation import plan_of, register, run, run_step
from tests.recurrence.cases import CONSTANT
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

register("tests.retention")


class Retention(ejx.Kernel):
    """Retention (Sun et al., 2023): `o_i = sum_{j <= i} gamma^(i - j) (q_i . k_j) v_j`, `gamma_h = 1 - 2^(-5 - h)`."""

    operation: ClassVar[str] = "tests.retention"

    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, platform: ejx.PlatformLike | None = None):
        self.plan = plan_of(Retention, self, platform, None, None)

    def __call__(self, q: Array, k: Array, v: Array, state: Any = None, cu_seqlens: Any = None) -> Any:
        frame = frame_of(q, "q", "H D", cu_seqlens, None, False)
        return run(self.plan, frame, self._operands(frame, q, k, v), state, None)

    def step(self, q: Array, k: Array, v: Array, state: Array) -> Any:
        frame = step_frame_of(q, "q", "H D")
        return run_step(self.plan, frame, self._operands(frame, q, k, v), state, None)

    def _operands(self, frame: Frame, q: Array, k: Array, v: Array) -> Operands:
        gamma = np.log(1 - 2.0 ** (-5.0 - np.arange(q.shape[-2])))
        return Operands(*frame.qkv(q, k, v), 1.0, frame.shared(jnp.asarray(gamma)), decay=CONSTANT)


def rotated(x):
    """Rotary angles, as retention gives its queries and keys."""
    angles = np.arange(x.shape[-3])[:, None, None] * 10.0 ** -np.linspace(0, 2, x.shape[-1] // 2)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = (jnp.asarray(part, x.dtype)[None] for part in (np.cos(angles), np.sin(angles)))
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def parallel(q, k, v):
    """The sum over all pairs."""
    length, heads = q.shape[-3:-1]
    distance = np.arange(length)[:, None] - np.arange(length)
    gamma = (1 - 2.0 ** (-5.0 - np.arange(heads)))[:, None, None]
    decay = np.where(distance >= 0, gamma ** np.maximum(distance, 0), 0.0)
    return jnp.einsum("bihd,bjhd,hij,bjhv->bihv", q, k, jnp.asarray(decay), v)


def operands():
    rng = np.random.default_rng(0)
    q, k = (rotated(jnp.asarray(rng.normal(size=(2, 37, 3, 8)))) for _ in "qk")
    return q, k, jnp.asarray(rng.normal(size=(2, 37, 3, 5)))


@pytest.mark.usefixtures("enable_x64")
def test_it_is_the_sum_over_pairs():
    retention, arrays = Retention(), operands()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, 37, 3, 5)))
    loss = lambda function: quick(jax.value_and_grad(lambda arrays: (function(*arrays) * weight).sum()))
    got, gradients = loss(lambda *arrays: retention(*arrays)[0])(arrays)
    want, wanted = loss(parallel)(arrays)
    assert_close(got, want)
    for x, y in zip(gradients, wanted):
        assert_close(x, y, kind="gradient")


@pytest.mark.usefixtures("enable_x64")
def test_it_steps_and_packs():
    retention, (q, k, v) = Retention(), operands()
    out, final = quick(retention.__call__)(q, k, v)
    half, state = quick(retention.__call__)(q[:, :36], k[:, :36], v[:, :36])
    last, state = quick(retention.step)(q[:, 36], k[:, 36], v[:, 36], state)
    assert_close(jnp.concatenate([half, last[:, None]], 1), out)
    assert_close(state, final)
    packed, states = quick(retention.__call__)(
        *(x.reshape(74, *x.shape[2:]) for x in (q, k, v)), cu_seqlens=jnp.array([0, 37, 74])
    )
    assert_close(packed.reshape(out.shape), out)
    assert_close(states, final)


def test_it_has_every_platform():
    explanation = str(ejx.explain("tests.retention"))
    assert all(platform in explanation for platform in ("triton", "triton-interpret", "xla"))
