"""The launch description, and interpretation from JAX: numerics, transformations, poison, errors."""

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.launch import executing
from tests.launch import kernels
from tests.launch.launches import (
    added,
    array,
    interpret,
    InterpretError,
    Launch,
    matmul_softmax,
    one_to_one,
    poison,
    run,
    S,
    square,
)

VECTOR = S((8,), jnp.float32)


def squared(x):
    return interpret(square(x.shape[0]), {"x": x})["out"]


def test_launches_that_are_left_to_others():
    """A compiled call is traced anew for each way of execution, and other threads run what they would run anyway."""
    seen, elsewhere = [], []

    def record(launch, arrays):
        seen.append(launch.label)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    call, x = jax.jit(lambda x: run(square(8), {"x": x})["out"]), jnp.arange(8.0)
    for _ in range(2):
        with executing(interpret):
            np.testing.assert_array_equal(call(x), np.arange(8.0) ** 2)
        with executing(record):
            assert not call(x).any()
            thread = threading.Thread(target=lambda: elsewhere.append(executing.value))
            thread.start()
            thread.join()
    assert seen == ["square_kernel"] and elsewhere == [None, None] and executing.value is None


# Rounding of the output to the dtype, against a float64 computation from the same rounded inputs.
@pytest.mark.parametrize(
    "precision, kept", [("tf32", 1.0), ("tf32x3", 1 + 2**-10 - 2**-20), ("ieee", 1 + 2**-10 - 2**-20)]
)
def test_one_pass_of_tf32_cuts_off(precision, kept):
    """As the hardware does, which does not round."""
    shape, constants = S((16, 16), jnp.float32), {"SIZE": 16, "PRECISION": precision}
    launch = Launch(kernels.product_kernel, {"x": shape, "y": shape}, {"out": shape}, {}, constants, (1,))
    x, one = jnp.full((16, 16), 1 + 2**-10 - 2**-20), jnp.eye(16)
    for arrays in ({"x": x, "y": one}, {"x": one, "y": x}):
        np.testing.assert_array_equal(interpret(launch, arrays)["out"], np.float32(kept))


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("float16", 5e-4), ("bfloat16", 4e-3)])
def test_matmul_softmax(dtype, tolerance):
    a, b = array((37, 45), dtype), array((45, 21), dtype, seed=1)
    call = lambda: interpret(matmul_softmax(a, b, 16, 32, 16), {"a": a, "b": b})
    outputs, staged = call(), jax.jit(call)()
    assert all(outputs[name].tobytes() == staged[name].tobytes() for name in outputs)
    logits = 0.5 * np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    assert outputs["out"].dtype == dtype
    np.testing.assert_allclose(np.asarray(outputs["out"], np.float64), expected, atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.asarray(outputs["logits_max"]), logits.max(1), atol=1e-5)


def test_language_tour():
    t, d, count = 8, 4, 13
    a, x = np.asarray(jax.nn.sigmoid(array((t, d)))), np.asarray(array((t, d), seed=1))
    plane, real = S((t, d), jnp.float32), jnp.float32
    inputs = {"decay": plane, "value": plane, "ints": S((1,), jnp.int32)}
    made = dict.fromkeys(("state", "backward", "sums"), plane) | {"best": S((d,), jnp.int32)}
    made |= {
        "flipped": S((d, t), real),
        "gate": plane,
        "extremes": S((3,), real),
        "loops": S((3,), jnp.int32),
    }
    launch = Launch(kernels.tour_kernel, inputs, made, {}, {"T": t, "D": d}, (1,))
    arrays = {"decay": jnp.asarray(a), "value": jnp.asarray(x), "ints": jnp.array([count], jnp.int32)}
    outputs = {name: np.asarray(out) for name, out in interpret(launch, arrays).items()}

    def scanned(a, x):
        h, rows = np.zeros(d), []
        for decay, value in zip(a, x):
            h = decay * h + value
            rows.append(h)
        return np.stack(rows)

    gate = 1 / (1 + np.exp(-x)) + np.abs(x) / np.log(2) + np.maximum(x, 0) - np.minimum(x, 0.5)
    expected = {
        "state": scanned(a, x),
        "backward": scanned(a[::-1], x[::-1])[::-1],
        "sums": np.cumsum(x, 0),
        "best": x.argmax(0),
        "flipped": x[::-1].T,
        "gate": gate,
        "extremes": [x.max(), x.sum(), count // 2 + count % 2 + -(-count // 4)],
        "loops": [sum(i * i for i in range(count)), 103, 10],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_unwritten_outputs_hold_poison():
    n = 8
    half = S((n,), jnp.bfloat16)
    outputs = {"out": half, "out_int": S((n,), jnp.int32)}
    launch = Launch(kernels.pick_kernel, {"x": half}, outputs, {"FLAG_ONLY": True}, {"BLOCK": n}, (1,))
    x = jnp.arange(n, dtype=jnp.bfloat16)
    outputs = {name: np.asarray(out) for name, out in interpret(launch, {"x": x}).items()}
    np.testing.assert_array_equal(outputs["out"][: n // 2], -np.asarray(x)[: n // 2])
    assert np.isnan(outputs["out"][n // 2 :]).all()
    np.testing.assert_array_equal(outputs["out_int"], [0, 1, 2, 3] + [poison(np.int32)] * 4)
    assert poison(np.bool_) and np.isnan(poison(jnp.float8_e4m3fn)) and poison(np.uint8) == 255


def test_masked_load_without_other_is_poison():
    one = {"out": S((1,), jnp.float32)}
    launch = Launch(kernels.unguarded_kernel, {"x": VECTOR}, one, {"n": 5}, {"BLOCK": 8}, (1,))
    assert np.isnan(interpret(launch, {"x": jnp.ones(8)})["out"]).all()


@jax.custom_vjp
def square_op(x):
    return squared(x)


# The derivative through the same kernel: x * g = ((x + g)^2 - x^2 - g^2) / 2.
square_op.defvjp(lambda x: (squared(x), x), lambda x, g: (squared(x + g) - squared(x) - squared(g),))


def test_jit_scan_and_grad():
    x = array((11,))

    def loss(x):
        y, outs = jax.lax.scan(lambda carry, _: (square_op(carry), square_op(carry).sum()), x, length=2)
        return y.sum() + outs.sum()

    def plain(x):
        return (x**4).sum() + (x**2).sum() + (x**4).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, plain(x), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(plain)(x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(jax.grad(loss)(x), gradient, rtol=1e-6)


def test_vmap_is_refused():
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(squared)(jnp.ones((2, 8)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_forward_and_gradient(check_vma):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x = array((8, 6))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"), check_vma=check_vma
    )
    def sharded(x):
        return square_op(x.reshape(-1)).reshape(x.shape)

    np.testing.assert_allclose(jax.jit(sharded)(x), x**2, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: sharded(x).sum()))(x)
    np.testing.assert_allclose(gradient, 2 * x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_inputs_without_shard_map(axis_type):
    # No rule says how to split the launch, so every device computes all of it; the numbers must be right.
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(axis_type,))
    x = jax.device_put(array((16,)), jax.NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(squared)(x), np.asarray(x) ** 2, rtol=1e-6)
        np.testing.assert_allclose(squared(x), np.asarray(x) ** 2, rtol=1e-6)


def test_empty_launch_varies_as_its_inputs_do():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    one = square(1, 1)
    launch = dataclasses.replace(one, grid=(0,))
    no_element = dataclasses.replace(one, outputs={"out": S((0, 3), jnp.float32)})
    assert run(no_element, {"x": jnp.ones(1)})["out"].shape == (0, 3)

    def local(x):
        out = run(launch, {"x": x})["out"]
        assert jax.typeof(out).manual_axis_type.varying == {"dp"}
        return out

    out = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(jnp.ones(8))
    np.testing.assert_array_equal(out, np.zeros(8))


def test_large_arrays_in_eight_callbacks_at_once():
    # Callbacks may wait for each other's copies; small arrays would not show it.
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x = jnp.arange(8 * 2**18, dtype=jnp.float32) % 1000
    local = lambda x: interpret(square(x.shape[0], block=2**16), {"x": x})["out"]
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(x)
    np.testing.assert_array_equal(out, np.asarray(x) ** 2)


def wild(offset=0, write=False):
    return one_to_one(kernels.wild_kernel, OFFSET=offset, WRITE_INPUT=write, BLOCK=8)


@pytest.mark.parametrize(
    "launch, message",
    [
        (wild(1), r"wild_kernel, program \(0, 0, 0\).*load from 'x' out of bounds: elements 1 to 8 of 8"),
        (wild(offset=-3), r"load from 'x' out of bounds: elements -3 to 4 of 8"),
        (wild(offset=2**30), r"load from 'x' out of bounds"),
        (wild(write=True), r"store to 'x', which is an input"),
    ],
)
def test_wrong_accesses_are_reported_not_made(launch, message):
    with pytest.raises(InterpretError, match=message):
        interpret(launch, {"x": jnp.ones(8)})


def test_block_has_no_truth_value():
    launch = one_to_one(kernels.block_truth_kernel, BLOCK=8)
    with pytest.raises(InterpretError, match="no truth value"):
        interpret(launch, {"x": jnp.ones(8)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kernel": kernels.output_first_kernel, "scalars": {}}, "'out' .outputs. comes before 'x' .inp"),
        ({"scalars": {"n": 8.0}}, "'n' must be an int or a bool, got 8.0 of type float"),
        ({"scalars": {}}, r"parameters \['n'\] are missing"),
        ({"scalars": {"n": 8, "m": 1}}, r"\['m'\] are not parameters"),
        ({"inputs": {"x": VECTOR, "n": VECTOR}}, "'n' is given in both inputs and scalars"),
        ({"scalars": {"n": 8, "BLOCK": 8}, "constants": {}}, "'out' .outputs. comes before 'BLOCK'"),
        ({"grid": ()}, "grid must be one to three"),
        ({"grid": (1, -1)}, "grid must be one to three"),
        ({"num_warps": 3}, "power of two"),
        ({"kernel": len}, "JITFunction"),
        (
            {"outputs": {"out": VECTOR, "BLOCK": VECTOR}, "constants": {}},
            r"'BLOCK' is annotated `tl.constexpr` in the kernel, but given in outputs",
        ),
    ],
)
def test_wrong_launches_are_refused(change, message, unchecked):
    fields: dict[str, Any] = dict(scalars={"n": 8}, constants={"BLOCK": 8}, grid=(1,))
    fields |= dict(kernel=kernels.square_kernel, inputs={"x": VECTOR}, outputs={"out": VECTOR})
    Launch(**fields)
    with pytest.raises(ValueError, match=message):
        Launch(**{**fields, **change})


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({}, r"expected the arrays \['x'\], got \[\]"),
        ({"x": jnp.ones(7)}, r"'x' must have shape \(8,\)"),
        ({"x": jnp.ones(8, jnp.bfloat16)}, "dtype float32, got .* bfloat16"),
    ],
)
def test_wrong_arrays_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        interpret(square(8), arrays)


# Outputs that start as an input


add_to_slots = functools.partial(added, n=5)
SLOTS = dict(amount=jnp.array([1.0, 2.0, 3.0]), slots=jnp.array([2, -1, 0], jnp.int32))


@pytest.mark.parametrize("staged", [False, True])
def test_an_aliased_output_starts_as_its_input(staged):
    pool = array((4, 5))
    before = np.array(pool)
    call = lambda pool: interpret(add_to_slots(), {"pool": pool, **SLOTS})
    outputs = (jax.jit(call) if staged else call)(pool)
    expected = before + np.array([3.0, 0, 1.0, 0], np.float32)[:, None]
    np.testing.assert_array_equal(outputs["new_pool"], expected)
    np.testing.assert_array_equal(outputs["old"], [before[2], np.zeros(5), before[0]])
    np.testing.assert_array_equal(pool, before)


def test_a_donated_buffer_may_be_aliased():
    call = lambda pool: interpret(add_to_slots(), {"pool": pool, **SLOTS})["new_pool"]
    step = jax.jit(call, donate_argnums=0)
    before = np.array(array((4, 5)))
    new = step(step(jnp.array(before)))
    np.testing.assert_allclose(new, before + 2 * np.array([3.0, 0, 1.0, 0])[:, None], rtol=1e-6)


def test_the_parameter_of_an_aliased_input_is_of_no_use():
    with pytest.raises(InterpretError, match="load from 'pool' out of bounds"):
        interpret(add_to_slots(wrong=True), {"pool": array((4, 5)), **SLOTS})


def test_an_empty_launch_leaves_an_aliased_output_as_it_came():
    pool = array((4, 5))
    outputs = run(add_to_slots(grid=(0,)), {"pool": pool, **SLOTS})
    np.testing.assert_array_equal(outputs["new_pool"], pool)
    assert not outputs["old"].any()


@pytest.mark.parametrize(
    "aliases, message",
    [
        ({"pool": "gone"}, "must name inputs and their outputs, got 'pool': 'gone'"),
        ({"new_pool": "new_pool"}, "must name inputs and their outputs"),
        ({"amount": "old"}, r"aliased outputs before others, got \('new_pool', 'old'\)"),
        ({"amount": "new_pool"}, r"one shape and dtype, got float32 \(3,\) and float32 \(4, 5\)"),
        ({"pool": "new_pool", "amount": "new_pool"}, "each output once"),
    ],
)
def test_wrong_aliases_are_refused(aliases, message):
    with pytest.raises(ValueError, match=message):
        add_to_slots(aliases=aliases)


def test_wrappers_around_the_kernel_are_taken_off():
    import triton

    configs = [triton.Config({}, num_warps=w) for w in (2, 4)]
    wrapped = triton.autotune(configs, key=["n"])(triton.heuristics({})(kernels.square_kernel))
    launch = Launch(wrapped, {"x": VECTOR}, {"out": VECTOR}, {"n": 8}, {"BLOCK": 8}, (1,))
    assert launch.function is kernels.square_kernel and launch.label == "square_kernel"
    np.testing.assert_array_equal(interpret(launch, {"x": jnp.arange(8.0)})["out"], np.arange(8.0) ** 2)


def test_language_is_as_it_was_after_success_and_failure():
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, JITFunction)
    before = [dict(vars(owner)) for owner in owners]
    interpret(square(8), {"x": jnp.ones(8)})
    with pytest.raises(InterpretError):
        interpret(wild(offset=1), {"x": jnp.ones(8)})
    assert [dict(vars(owner)) for owner in owners] == before
