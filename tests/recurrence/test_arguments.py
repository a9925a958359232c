"""What the operations refuse, what they choose, and that modules built alike are alike."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.recurrence.arguments import frame_of, Operands
from ejkernel_eqx.recurrence.operation import plan_of, register, run
from tests.arrays import array
from tests.recurrence.operations import CASES, xla

pytestmark = pytest.mark.usefixtures("unchecked")
T = 3
f32 = lambda *shape: array(np.ones(shape), jnp.float32)
q, k, v = f32(2, T, 4, 6), f32(2, T, 2, 6), f32(2, T, 2, 5)
state = f32(2, 2, 6, 5)
scalar, key, per_head = f32(2, T, 2), f32(2, T, 2, 6), f32(2)
x, dt, A, B = f32(2, T, 4, 5), f32(2, T, 4), f32(4), f32(2, T, 2, 6)

no_array: Any = [1.0]
nothing: Any = None
other: Any = "another"
product = ejx.DeltaProduct()
linear, gla, dplr = ejx.LinearAttention(), ejx.GatedLinearAttention(), ejx.DPLRDeltaRule()
mean = ejx.LinearAttention(normalize=True)
kda, soft = ejx.KernelDeltaAttention(), ejx.KernelDeltaAttention(gate="softplus")
gated, ssd = ejx.GatedDeltaRule(gate="softplus"), ejx.StateSpaceV2()

slots: Any = dict(state_indices=jnp.zeros(3, int))

# What is called, and words of what is said about it.
CALLS = {
    "no array": (lambda: linear(no_array, k, v), r"q: expected an array \[..., T H D\], received list"),
    "rank": (lambda: linear(f32(4, 6), k, v), r"q: expected rank 3 or more, .*; add the missing axes"),
    "integers": (lambda: linear(q.astype(jnp.int32), k, v), "q: expected dtype bfloat16, .*; cast it first"),
    "tokens": (lambda: linear(q, k[:, 1:], v), r"k: expected shape \[2, 3, H, 6\], received \(2, 2, 2, 6\)"),
    "lead": (lambda: linear(q, k, v[0]), r"v: expected shape \[2, 3, H, V\], received \(3, 2, 5\)"),
    "dtypes": (lambda: linear(q, k, v.astype(jnp.bfloat16)), "v: expected the dtype of the first operand"),
    "heads": (lambda: linear(q, f32(2, T, 3, 6), v), "v: expected a head count that divides the largest"),
    "heads with a bonus": (
        lambda: gla(q, f32(2, T, 3, 6), v, f32(2, T, 2, 6), bonus=f32(1, 6)),
        "g: expected a head count that divides the largest",
    ),
    "query heads": (
        lambda: linear(f32(2, T, 3, 6), k, v),
        "q: expected a head count that divides the largest",
    ),
    "two decays": (
        lambda: linear(q, k, v, g=scalar, g_gamma=per_head),
        "g_gamma: expected one kind of decay",
    ),
    "three decays": (lambda: linear(q, k, v, g=scalar, gk=key, gv=v), "gk: expected one kind of decay"),
    "heads of decays": (
        lambda: linear(q, k, v, g=scalar, gk=f32(2, T, 3, 6)),
        "gk: .* that of g or vice versa",
    ),
    "decay of a token": (lambda: linear(q, k, v, g_gamma=scalar), r"g_gamma: expected shape \[H\]"),
    "values' decay": (lambda: linear(q, k, v, gv=key), r"gv: expected shape \[2, 3, H, 5\]"),
    "a mean decays": (lambda: mean(q, k, v, g=scalar), "normalize: expected no decay with normalize=True"),
    "readers": (lambda: dplr(q, k, v, key[..., :1], key, key), r"a: expected shape \[2, 3, H, 6\]"),
    "writers": (
        lambda: dplr(q, k, v, key, key.astype(jnp.bfloat16), key),
        "b: expected the dtype of the first operand",
    ),
    "heads of readers": (
        lambda: dplr(q, k, v, f32(2, T, 3, 6), key, -key),
        "b: expected a head count that divides the largest",
    ),
    "writes": (
        lambda: product(q, k[:, :, None], v[:, :, None][:, :, [0, 0]], scalar[:, :, None]),
        r"v: expected shape \[2, 3, 1, H, V\]",
    ),
    "no write": (
        lambda: product(q, f32(2, T, 0, 2, 6), v, scalar),
        "k: expected at least one write per token",
    ),
    "no decay": (
        lambda: product(q, k[:, :, None], v[:, :, None], scalar[:, :, None], A_log=per_head),
        "g: expected an array with A_log",
    ),
    "bonus": (lambda: gla(q, k, v, -key, bonus=f32(2, 5)), r"bonus: expected shape \[H, 6\]"),
    "heads of the bonus": (
        lambda: gla(q, k, v, -key, bonus=f32(3, 6)),
        "bonus: expected a head count that divides",
    ),
    "rates": (lambda: ejx.RWKV7()(k, key, k, v, k, key[..., :1, :]), r"eta: expected shape \[2, 3, 2, 6\]"),
    "removal keys": (
        lambda: ejx.RWKV7()(k, key, k, v, k.astype(jnp.bfloat16), key),
        "kappa: expected the dtype of the first operand",
    ),
    "no pair": (lambda: mean(q, k, v, initial_state=state), r"initial_state: expected a pair \(S, z\)"),
    "no pair to step": (
        lambda: mean.step(q[:, 0], k[:, 0], v[:, 0], state),
        r"state: expected a pair \(S, z\)",
    ),
    "z": (
        lambda: mean(q, k, v, initial_state=(state, f32(2, 2, 5))),
        r"expected z of shape \[..., 2, 6\], as k",
    ),
    "state": (
        lambda: gla(q, k, v, key, initial_state=state[:1]),
        r"initial_state: expected shape \[2, 2, 6, 5\]",
    ),
    "states": (
        lambda: gla(q[0], k[0], v[0], key[0], initial_state=state[0], cu_seqlens=jnp.array([0, 1, 3])),
        r"initial_state: expected shape \[2, 2, 6, 5\], received \(2, 6, 5\); the layout is \[N H D V\]",
    ),
    "channels": (lambda: gla(q, k, v, scalar), r"g: expected shape \[2, 3, H, 6\], received \(2, 3, 2\)"),
    "slopes": (lambda: ejx.LightningAttention(None)(q, k, v), r"slopes: expected an array \[H\]"),
    "more slopes": (lambda: ejx.LightningAttention()(q, k, v, slopes=per_head), "slopes: expected None"),
    "no beta": (
        lambda: kda(q, k, v, key, nothing),
        r"beta: expected an array \[..., T H\], received NoneType",
    ),
    "A_log": (lambda: kda(q, k, v, key, scalar, A_log=per_head), "A_log: expected None with gate='log'"),
    "dt_bias": (
        lambda: kda(q, k, v, key, scalar, dt_bias=key[0, 0]),
        "dt_bias: expected None with gate='log'",
    ),
    "no A_log": (lambda: soft(q, k, v, key, scalar), r"A_log: expected an array \[H\] with gate='softplus'"),
    "heads of A_log": (lambda: soft(q, k, v, key, scalar, A_log=f32(4)), r"A_log: expected shape \[2\]"),
    "channels of dt_bias": (
        lambda: soft(q, k, v, key, scalar, A_log=per_head, dt_bias=per_head),
        r"dt_bias: expected shape \[2, 6\], received \(2,\)",
    ),
    "no channels": (
        lambda: gated(q, k, v, scalar, scalar, A_log=per_head, dt_bias=f32(2, 6)),
        r"dt_bias: expected shape \[2\], received \(2, 6\)",
    ),
    "groups": (lambda: ssd(x, dt, A, f32(2, T, 3, 6), f32(2, T, 3, 6)), "B: expected a number of groups"),
    "B and C": (lambda: ssd(x, dt, A, B, f32(2, T, 1, 6)), r"C: expected shape \[2, 3, 2, 6\]"),
    "dtype of B": (lambda: ssd(x, dt, A, B.astype(jnp.float16), B), "B: expected the dtype of the first"),
    "heads of dt": (lambda: ssd(x, dt[..., :2], A, B, B), r"dt: expected shape \[2, 3, 4\]"),
    "heads of A": (lambda: ssd(x, dt, f32(4, 6), B, B), r"A: expected shape \[4\], received \(4, 6\)"),
    "D": (lambda: ssd(x, dt, A, B, B, D=f32(4, 6)), r"D: expected shape \[4, 5\], received \(4, 6\)"),
    "D of heads": (lambda: ssd(x, dt, A, B, B, D=f32(2)), r"D: expected shape \[4\], received \(2,\)"),
    "z of x": (lambda: ssd(x, dt, A, B, B, z=x[..., :4]), r"z: expected shape \[2, 3, 4, 5\]"),
    "norm_weight": (lambda: ssd(x, dt, A, B, B, norm_weight=f32(4, 5)), "norm_weight: expected None"),
    "SSD's state": (
        lambda: ssd(x, dt, A, B, B, initial_state=f32(2, 4, 6, 5)),
        r"the layout is \[..., H P N\]",
    ),
    "Mamba-3's groups": (
        lambda: trapezoid(B=f32(2, T, 1, 3, 6)),
        "B: expected at least one rank, and a head",
    ),
    "Mamba-3's angles": (
        lambda: trapezoid(angles=f32(2, T, 4, 4)),
        "angles: expected at most one for each pair",
    ),
    "Mamba-3's bias": (lambda: trapezoid(B_bias=f32(4, 6)), r"B_bias: expected shape \[4, 1, 6\]"),
    "ranks": (
        lambda: trapezoid(mimo_x=f32(4, 2, 5)),
        r"mimo_x: expected shape \[4, 1, 5\], received \(4, 2, 5\)",
    ),
    "no rank": (lambda: trapezoid(B=f32(2, T, 0, 2, 6)), "B: expected at least one rank"),
    "no pair of Mamba-3": (
        lambda: trapezoid(initial_state=f32(2, 4, 5, 6)),
        r"initial_state: expected a pair \(S, last\), received",
    ),
    "what a token leaves": (
        lambda: trapezoid(initial_state=(f32(2, 4, 5, 6), f32(2, 4, 13))),
        r"initial_state: expected shape \[2, 4, 15\], received \(2, 4, 13\)",
    ),
    "rows of slots": (
        lambda: gla.step(q, k, v, key, f32(4, 2, 6, 5), state_indices=jnp.zeros((2, 3), int)),
        r"state_indices: expected operands with one axis of rows, .* received leading axes \(2, 3\)",
    ),
    "one slot a row": (
        lambda: step(f32(4, 2, 6, 5), state_indices=slots["state_indices"][:2]),
        "expected 3 integers",
    ),
    "no slots": (lambda: step(f32(4, 2, 6, 5), state_indices=f32(3)), "state_indices: expected 3 integers"),
    "pool": (lambda: step(f32(2, 6, 5), **slots), r"state: expected shape \[slots, 2, 6, 5\]"),
    "step's state": (lambda: step(state[0]), r"state: expected shape \[3, 2, 6, 5\], received \(2, 6, 5\)"),
}


def trapezoid(**named):
    arrays = {
        "x": x,
        "dt": dt,
        "g": -dt,
        "B": B[:, :, None],
        "C": named.get("B", B[:, :, None]),
        "trap": dt,
        "angles": f32(2, T, 1, 3),
    }
    return ejx.StateSpaceV3()(**(arrays | named))


def step(state, **named):
    return gla.step(q[0], k[0], v[0], key[0], state, **named)


@pytest.mark.parametrize("call, message", CALLS.values(), ids=CALLS)
def test_calls_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


GROWING = {
    "g": lambda g: linear(q, k, v, g=g[..., 0]),
    "gk": lambda g: linear(q, k, v, gk=g),
    "gv": lambda g: linear(q, k, v, gv=g[..., :5]),
    "g_gamma": lambda g: linear(q, k, v, g_gamma=g[0, 1, :, 0]),
    "channels": lambda g: kda(q, k, v, g, scalar),
    "gated": lambda g: gla(q, k, v, g),
    "rank one": lambda g: dplr(q, k, v, k, k, g),
    "trapezoid": lambda g: ejx.StateSpaceV3()(
        k, scalar, g[..., 0], k[:, :, None], k[:, :, None], scalar, k[..., :3]
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_known_decays_that_grow_are_refused(name):
    argument = "g" if name in ("channels", "gated", "rank one", "trapezoid") else name
    with pytest.raises(ValueError, match=f"{argument}: expected log-decays of at most 0, received 0.25"):
        GROWING[name](jnp.full_like(k, -1.0).at[0, 1].set(0.25))


def test_known_rates_and_slopes_that_grow_are_refused():
    rates = jnp.array([-1.0, 0.25])
    with pytest.raises(ValueError, match=r"A: expected rates of at most 0, received 0\.25; pass -exp"):
        ejx.StateSpaceV2()(k, scalar, rates, k[..., :1, :], k[..., :1, :])
    x, B = jnp.ones((3, 2)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"A: expected rates of at most 0, received 0\.25; pass -exp"):
        ejx.StateSpaceV1()(x, x, jnp.full((2, 4), 0.25), B, B)
    with pytest.raises(ValueError, match="slopes: expected slopes of at least 0, received -1"):
        ejx.LightningAttention(slopes=None)(q, k, v, slopes=rates)


OPTIONS = {
    "scale": (lambda: ejx.LinearAttention(float("nan")), "expected a finite number or None, received nan"),
    "state_dtype": (
        lambda: ejx.DeltaRule(state_dtype=jnp.int8),
        "expected one of float32, .*, received int8",
    ),
    "slopes": (lambda: ejx.LightningAttention(other), "expected 'minimax', 'fla' or None"),
    "layer": (lambda: ejx.LightningAttention("fla", 4, 4), "layer_index: .* num_layers, received 4 of 4"),
    "gate": (lambda: ejx.GatedDeltaRule(gate=other), "gate: expected one of 'log', 'softplus', 'bounded'"),
    "lower_bound": (
        lambda: ejx.KernelDeltaAttention(gate="bounded"),
        "lower_bound: expected a negative number",
    ),
    "dt_limit": (lambda: ejx.StateSpaceV2(dt_limit=(1.0, 0.0)), "dt_limit: expected"),
    "norm": (lambda: ejx.StateSpaceV2(norm=other), "norm: expected 'group', 'whole' or None"),
    "norm_eps": (lambda: ejx.StateSpaceV2(norm_eps=-1.0), "norm_eps: expected a number >= 0"),
    "platform": (lambda: ejx.DeltaRule(platform="cuda"), "delta_rule"),
    "tune_for": (lambda: ejx.DeltaRule(tune_for=[q]), "tune_for: expected a tuple of the call's arguments"),
}


@pytest.mark.parametrize("build, message", OPTIONS.values(), ids=OPTIONS)
def test_options_that_do_not_fit(build, message):
    with pytest.raises((ValueError, ejx.UnsupportedError), match=message):
        build()


class Own(ejx.Kernel):
    """An operation of a user's own, with transitions of rank one."""

    operation = "tests.rank_one"
    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, platform):
        self.plan = plan_of(Own, self, platform, None, None)

    def __call__(self, q, k, v):
        frame = frame_of(q, "q", "H D", None, None, False)
        return run(self.plan, frame, Operands(q, k, v, 1.0, a=k, b=k), None, None)


register("tests.rank_one")
ON_XLA = {
    "does not support a decay per value channel": lambda p: ejx.LinearAttention(platform=p)(q, k, v, gv=v),
    "transitions of rank one": lambda p: Own(p)(q, k, v),
}


@pytest.mark.parametrize("platform", ["triton-interpret", "pallas-interpret"])
@pytest.mark.parametrize("reason", ON_XLA)
def test_what_is_no_work_for_kernels(reason, platform):
    if "triton" in platform:
        pytest.importorskip("triton")
    with pytest.raises(ejx.UnsupportedError, match=f"{platform}': .*{reason}"):
        jax.eval_shape(lambda: ON_XLA[reason](platform))


def test_wide_keys_with_transitions_of_rank_one():
    pytest.importorskip("triton")
    wide = jax.ShapeDtypeStruct((3, 1, 136), jnp.float32)
    with pytest.raises(
        ejx.UnsupportedError, match="takes key dims up to 128 with transitions of rank one, not D 136"
    ):
        jax.eval_shape(ejx.DPLRDeltaRule(platform="triton-interpret"), *6 * [wide])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_modules_built_alike_are_alike(case):
    one, two = case.module(), case.module()
    assert one == two and hash(one.plan) == hash(two.plan)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert jax.tree.leaves(one) == []  # static throughout
    assert one.plan.operation == one.operation
    assert case.module(config=xla.XlaConfig(8)).plan != one.plan


def test_settled_for_shapes():
    """`tune_for` traces the very call, options and all, and keeps the choice that it would make."""
    case = CASES["kernel delta bounded"]
    arrays = jax.eval_shape(lambda: case.make(2, 5, dtype=jnp.float32))
    positional = [arrays[name] for name in ("q", "k", "v", "g", "beta")]
    call = ejx.inputs(*positional, A_log=arrays["A_log"], dt_bias=arrays["dt_bias"])
    module = case.module(config=None, platform="xla", tune_for=call)
    assert module.plan.pinned and module.options == case.module().options
    assert module == case.module(config=None, platform="xla", tune_for=call)


@pytest.mark.parametrize(
    "named, match",
    [
        (dict(state_indices=[1, 2]), "initial_state: expected a pool"),
        (dict(state_indices=[1]), "state_indices: expected 2 integers"),
        (dict(state_indices=[1, 2], initial_state=(7, 2, 6, 6)), r"expected shape \[slots, 2, 6, 5\]"),
        (dict(state_indices=[0], cu_seqlens=None), "expected operands with one axis of rows"),
    ],
)
def test_pools_of_states(named, match):
    given = {"cu_seqlens": [0, 3, 5]} | named
    given = {n: jnp.zeros(x) if n == "initial_state" else x and jnp.asarray(x) for n, x in given.items()}
    with pytest.raises(ValueError, match=match):
        gla(f32(5, 4, 6), f32(5, 2, 6), f32(5, 2, 5), -f32(5, 2, 6), **given)
