"""What the tuner is given: inputs that are of their very problem, results that agree with the plain mathematics, and their cost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import workloads
from tests.recurrence.cases import example_problem, problem_of, samples, step_problem_of
from tests.tolerances import errors

SIZES = dict(B=2, T=40, H=4, D=8, V=16)
OPERATIONS = (
    "linear_attention",
    "gated_linear_attention",
    "lightning_attention",
    "kernel_delta_attention",
    "gated_delta_rule",
    "delta_rule",
    "delta_product",
    "dplr_delta_rule",
    "rwkv7",
    "state_space_v2",
    "state_space_v3",
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"packed": "offsets", "initial_state": True},
    {"packed": "segments"},
)


def problem(operation: str, flags: dict[str, Any], dtype: str = "float32") -> workloads.Problem:
    sizes = SIZES | ({"N": 3} if flags.get("packed") == "offsets" else {})
    return example_problem(operation, sizes, dtype, flags)


@pytest.mark.few(2)
@pytest.mark.parametrize("flags", OPTIONS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_inputs_are_of_their_problem(operation, flags):
    wanted = problem(operation, flags, "bfloat16")
    inputs = samples.make_inputs(wanted, 0)
    found = problem_of(operation, inputs.arrays, samples.spec_of(wanted))
    assert (found, found.key()) == (wanted, wanted.key())
    other = samples.make_inputs(wanted, 1)
    assert (np.asarray(inputs.arrays.q) != np.asarray(other.arrays.q)).any()


@pytest.mark.few(3)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_step_inputs_are_of_their_problem(operation, slots):
    wanted = problem(operation, {"step": True, "slots": slots}, "bfloat16")
    arrays = samples.make_step_inputs(wanted, 0)
    assert step_problem_of(operation, arrays, samples.spec_of(wanted)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, flags",
    [
        ("gated_linear_attention", OPTIONS[1]),
        ("kernel_delta_attention", {"initial_state": True}),
        ("state_space_v2", OPTIONS[2]),
        ("rwkv7", OPTIONS[1]),
        ("gated_linear_attention", OPTIONS[1] | {"before": True}),
        ("lightning_attention", {}),
        ("gated_delta_rule", {"step": True, "slots": True}),
    ],
    ids=str,
)
def test_xla_agrees_with_the_reference(operation, flags):
    of = problem(operation, flags)
    _, reference = workloads.assert_agrees(operation, "xla", of)
    assert ("g" in reference) == (operation != "delta_rule" and not flags.get("step"))
    assert all(np.asarray(x).any() for x in reference.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, flags",
    [
        ("lightning_attention", OPTIONS[1]),
        ("linear_attention", {"decay": "scalar"}),
    ],
    ids=str,
)
def test_the_reference_of_float32_is_exact_over_many_tokens(operation, flags):
    """Slow decays, a thousand tokens: the recurrence in float32 is itself off by more than the table allows."""
    sizes = dict(B=1, T=1000, H=4, D=8) | ({"N": 3} if flags.get("packed") == "offsets" else {})
    of = example_problem(operation, sizes, "float32", flags)
    made = workloads.work_of(operation, "xla", of)
    inputs = made.make_inputs(1)
    found = made.reference(inputs)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, inputs)
        exact = jax.tree.map(np.asarray, made.reference(wide))
    assert found.keys() == exact.keys()
    for name, x in found.items():
        assert x.dtype == jnp.float32 and exact[name].dtype == np.float64, name
        assert errors(x, exact[name]).rms < 1e-7, name


def test_costs_are_those_of_the_arrays_and_products():
    of = "gated_linear_attention", "gated_delta_rule"
    made = workloads.work_of(of[0], "xla", problem(of[0], {}, "bfloat16"))
    tokens = 2 * 40 * 4
    q_k, v_out, g, state = 2 * tokens * 8 * 2, 2 * tokens * 16 * 2, tokens * 8 * 4, 2 * 4 * 8 * 16 * 4
    assert made.costs[workloads.FORWARD].bytes == q_k + v_out + g + state
    assert made.costs[workloads.FORWARD].flops == tokens * (40 * (8 + 16) + 4 * 8 * 16)
    assert made.costs[workloads.BOTH].bytes == 2 * (q_k + v_out + g + state) + q_k + v_out / 2 + g
    step = workloads.work_of(of[1], "xla", problem(of[1], {"step": True}, "bfloat16"))
    assert step.costs[workloads.FORWARD].bytes > 2 * state


test_what_does_not_fit_is_told = workloads.refusals(
    "linear_attention",
    example_problem,
    [
        (dict(H=4, D=8), {}, "T"),
        (dict(T=4, H=4, D=8, X=1), {}, "X"),
        (dict(T=4, H=4, D=8, Hk=3), {}, "Hk=3"),
        (dict(T=4, H=4, D=8), {"causal": True}, "causal"),
        (dict(T=4, H=4, D=8), {"decay": "fast"}, "fast"),
        (dict(T=4, H=4, D=8), {"packed": "rows"}, "rows"),
        (dict(T=4, H=4, D=8), {"beta": 1}, "beta"),
    ],
)


def test_none_is_a_word_of_the_command_line():
    """It reads `--flag decay=none` as None."""
    sizes = {"B": 1, "T": 8, "H": 2, "D": 16}
    named = [example_problem("linear_attention", sizes, "float32", {"decay": x}) for x in ("none", None)]
    assert named[0] == named[1] and dict(named[0].flags)["decay"] == "none"
    with pytest.raises(ValueError, match="expected decay=none or decay=constant"):
        example_problem("linear_attention", sizes, "float32", {"decay": False})
