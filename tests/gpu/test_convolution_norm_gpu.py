"""The short convolution, the gated norm and the recurrences' step on a GPU: the Triton kernels against the float64 reference, and what only
a GPU can show.

python -m pytest tests/gpu/test_convolution_norm_gpu.py -n 8
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.convolution import cases as conv
from tests.gpu.host import candidates, example_problem, on_host
from tests.normalization import cases as norm
from tests.recurrence import test_triton_step as steps
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "causal_conv1d"
REPEATS = 4


def assert_agrees(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        kind = "forward" if name in ("out", "final_state") else "gradient"
        assert_close(x, expected[name], dtype, kind, name=name)


def assert_same(first: Any, second: Any, what: str = "a second run") -> None:
    """Bit for bit but for NaN."""
    (named, tree), others = jax.tree.flatten_with_path(first), jax.tree.leaves(second)
    assert tree == jax.tree.structure(second)
    for (path, a), b in zip(named, others, strict=True):
        message = f"{what} differs in {jax.tree_util.keystr(path) or 'the result'}"
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=message)


def longer(case: conv.Case) -> conv.Case:
    """The same at a size of several programs, with a last one that is not full."""
    length = case.T * 37
    if case.offsets is not None:
        packed = tuple(int(offset) * 37 for offset in case.offsets)
    elif case.ids is not None:
        packed = tuple(tuple(int(n) for n in np.repeat(row, 37)) for row in case.ids)
    else:
        packed = None
    channels = 200 if case.norm is None else 50 * case.norm
    return dataclasses.replace(case, T=length, C=channels, packed=packed)


CONVOLUTIONS = conv.CASES | {f"{name}, long": longer(case) for name, case in conv.CASES.items()}
CONVOLUTIONS |= {
    f"heads of {size}": conv.Case(T=333, C=5 * size, norm=size, initial=size == 64, bias=False)
    for size in (32, 64, 128)
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, dtype):
    """Results and every gradient; the same bit for bit when run again, and with NaN in the padding."""
    case = dataclasses.replace(CONVOLUTIONS[name], dtype=dtype)
    inputs, cotangents = conv.make(case)
    op = ejx.CausalConv1d(case.activation, norm_size=case.norm, platform="triton")
    found = conv.results(op, inputs, case.packing, cotangents)
    assert_agrees(found, on_host(conv.exact, case, inputs, cotangents), dtype)
    poisoned = conv.results(op, conv.poison(case, inputs), case.packing, cotangents)
    assert_same(found, poisoned, "a run with NaN in the padding")
    for n in range(1, REPEATS):
        assert_same(found, conv.results(op, inputs, case.packing, cotangents), f"run {n}")


def test_every_candidate_of_the_convolution():
    case = dataclasses.replace(CONVOLUTIONS["padding inside, long"], dtype="bfloat16")
    inputs, cotangents = conv.make(case)
    expected = on_host(conv.exact, case, inputs, cotangents)
    of = example_problem("causal_conv1d", dict(B=2, T=case.T, C=case.C), "bfloat16", dict(packed=True))
    for config in candidates("causal_conv1d", of):
        op = ejx.CausalConv1d("silu", config=config)
        assert_agrees(conv.results(op, inputs, case.packing, cotangents), expected, case.dtype)


NORMS = norm.CASES | {
    "wide": norm.Case((2, 300, 4096)),
    "wide, norm first": norm.Case((2, 300, 4096), "sigmoid", True),
    "heads": norm.Case((2, 77, 16, 128), norm_before_gate=True),
    "odd groups": norm.Case((3, 130, 600), group_size=100),
    "widest": norm.Case((5, 16384)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_norm(name, dtype):
    """The output and every gradient; the same bit for bit when run again."""
    case = dataclasses.replace(NORMS[name], dtype=dtype)
    inputs, dout = norm.make(case)
    op = case.operation("triton")
    found = norm.results(op, inputs, dout)
    assert_agrees(found, on_host(norm.exact, case, inputs, dout), dtype)
    for n in range(1, REPEATS):
        assert_same(found, norm.results(op, inputs, dout), f"run {n}")


def larger(case: steps.Case) -> steps.Case:
    return dataclasses.replace(case, rows=37, dim=128, values=100, slots=case.slots and 41)


STEPS = steps.CASES | {f"{name}, large": larger(case) for name, case in steps.CASES.items()}


@pytest.mark.parametrize("name", STEPS)
def test_step(name):
    """Output and states, in the very buffer that was donated."""
    case = STEPS[name]
    arrays = steps.make(case)
    expected, expected_state = on_host(steps.exact, jax.tree.map(np.asarray, arrays), case.spec)

    @functools.partial(jax.jit, donate_argnums=0)
    def one(state, rest):
        return steps.step(rest._replace(state=state), case.spec, case.config)

    state, rest = jnp.array(arrays.state), arrays._replace(state=jnp.zeros(()))
    again = one(jnp.array(arrays.state), rest)
    address = state.unsafe_buffer_pointer()
    out, new = one(state, rest)
    assert new.unsafe_buffer_pointer() == address
    assert_close(out, expected, case.dtype)
    assert_close(new, expected_state, case.state)
    assert_same(again, (out, new))


def test_step_leaves_a_state_that_is_not_donated():
    case = STEPS["kda, large"]
    arrays = steps.make(case)
    before = np.array(arrays.state)
    _, new = jax.jit(lambda arrays: steps.step(arrays, case.spec, case.config))(arrays)
    np.testing.assert_array_equal(np.asarray(arrays.state), before)
    assert (np.asarray(new) != before).any()


# What only a large device can hold


@pytest.mark.memory(30)
def test_past_two_to_the_31_elements():
    """The last rows of a call that is larger than 32-bit offsets reach, against a call of theirs alone."""
    length, channels = 2**17 + 5, 2**14 + 64
    x = jax.random.normal(jax.random.key(0), (length, channels), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (channels, 4), jnp.float32)
    op, tail = ejx.CausalConv1d("silu", platform="triton"), 100

    def both(x, weight):
        out, pull = jax.vjp(lambda x: op(x, weight)[0], x)
        return out[-tail:], pull(jnp.ones_like(out))[0][-tail:]

    def alone(x, weight):
        out, pull = jax.vjp(lambda x: op(x, weight)[0], x)
        return out[3:], pull(jnp.ones_like(out))[0][3:]

    out, dx = jax.jit(both)(x, weight)
    assert_same((out, dx), jax.jit(alone)(x[-tail - 3 :], weight))
    gate = jax.jit(lambda x: ejx.GatedRMSNorm(platform="triton")(x, x)[-tail:])
    norm_of = jax.jit(lambda x: ejx.GatedRMSNorm(platform="triton")(x, x))
    narrow = x[:, : 2**14].reshape(-1, 2**13)
    rows = -(-(2**31 + 2**20) // 2**13)
    many = jnp.resize(narrow[:1000], (rows, 2**13))
    assert_same(gate(many), norm_of(many[-tail:]))


def test_more_rows_than_a_grid_axis_has():
    """More than 65535 programs of each kind."""
    x = jax.random.normal(jax.random.key(0), (70_000, 2, 16), jnp.float32)
    weight = jax.random.normal(jax.random.key(1), (16, 3), jnp.float32)
    out = jax.jit(lambda x: ejx.CausalConv1d("silu", platform="triton")(x, weight)[0])(x)
    expected = jax.jit(lambda x: ejx.CausalConv1d("silu", platform="xla")(x, weight)[0])(x)
    assert_close(out, expected)
    gate = ejx.GatedRMSNorm(platform="triton")
    found = jax.jit(jax.grad(lambda w: (gate(x, x, w) ** 2).sum()))(jnp.ones(16))
    wanted = jax.jit(jax.grad(lambda w: (ejx.GatedRMSNorm(platform="xla")(x, x, w) ** 2).sum()))(jnp.ones(16))
    assert_close(found, wanted, kind="gradient")
