"""What every user's kernel can do without having been told how: batch axes, `vmap`, gradients, `scan`, `checkpoint`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import selections_of
from tests.attention.dense import normal, quick
from tests.custom.kernels import close, define, Opaque, plain, Square
from tests.tolerances import assert_close

KERNELS: dict[str, Any] = {
    "xla": lambda: Square(),
    "interpreted": lambda: Square(platform="triton-interpret"),
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    if request.param != "xla":
        pytest.importorskip("triton")
    return KERNELS[request.param]()


X, WEIGHT = normal(0, 3, 5, 37), normal(1, 37)


def loss(function):
    return lambda x, weight: jnp.sum(jnp.sin(function(x, weight)))


def gradient(function):
    return jax.grad(loss(function), (0, 1))


@pytest.mark.parametrize("shape", [(37,), (3, 37), (2, 3, 37), (0, 37)])
def test_any_batch_axes(kernel, shape):
    x = normal(2, *shape)
    close(kernel(x, WEIGHT), 2.0 * np.asarray(WEIGHT) * np.asarray(x) ** 2)
    close(quick(gradient(kernel))(x, WEIGHT), quick(gradient(plain))(x, WEIGHT))


def over_layers(f):
    step = jax.checkpoint(lambda x, weight: (jnp.tanh(f(x, weight)), None))
    return gradient(lambda x, weight: jax.lax.scan(step, x[0], jnp.stack([weight, weight / 4]))[0])


TRANSFORMATIONS = {
    "scan of checkpoints": over_layers,
    "grad": gradient,
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, (0, None)), (0, None)),
    "vmap along 1": lambda f: jax.vmap(f, (1, None), 1),
    "grad of vmap": lambda f: gradient(jax.vmap(f, (0, None))),
    "grads per example": lambda f: jax.vmap(gradient(f), (0, None)),
    "shared by no axis": lambda f: jax.vmap(f, (None, 0)),
    "weight per example": lambda f: jax.vmap(f),
    "grads of weights per example": lambda f: jax.vmap(gradient(f)),
    "checkpoint": lambda f: gradient(jax.checkpoint(f)),
    "jit": lambda f: jax.jit(gradient(jax.jit(jax.vmap(f, (0, None))))),
    "jacobian": lambda f: lambda x, weight: jax.jacrev(f, 1)(x[0, :2], weight),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(kernel, name):
    transform: Any = TRANSFORMATIONS[name]
    weight = WEIGHT
    if name in ("shared by no axis", "weight per example", "grads of weights per example"):
        weight = jnp.stack([WEIGHT, 2 * WEIGHT, 3 * WEIGHT])
    close(quick(transform(kernel))(X, weight), quick(transform(plain))(X, weight))


@pytest.mark.parametrize("name", ["grad of vmap", "grads per example", "grads of weights per example"])
def test_summed_gradients_of_shared_inputs(name):
    pytest.importorskip("triton")
    test_transformations(Square(rows=False, platform="triton-interpret"), name)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_shared_inputs_are_summed_in_float32(kernel, dtype):
    x, weight = normal(0, 300, 37, dtype=dtype), normal(1, 37, dtype=dtype)
    dx, dweight = quick(lambda x, w: jax.vjp(kernel, x, w)[1](jnp.ones_like(x)))(x, weight)
    assert dx.dtype == dweight.dtype == dtype
    wide = x.astype(jnp.float32), weight.astype(jnp.float32)
    expected = quick(lambda x, w: jax.vjp(plain, x, w)[1](jnp.ones_like(x)))(*wide)
    assert_close(dx, expected[0], kind="gradient")
    assert_close(dweight, expected[1], kind="gradient")


def test_forward_mode_where_jax_sees_the_formula():
    tangents = normal(4, *X.shape), normal(5, 37)
    close(jax.jvp(Square(), (X, WEIGHT), tangents), jax.jvp(plain, (X, WEIGHT), tangents))


def launched(function, *args):
    """The rows of every distinct choice that a call makes."""
    return {selection.problem.dim("B") for selection in selections_of(function, ejx.inputs(*args))}


def test_vmap_is_one_launch():
    pytest.importorskip("triton")
    kernel, summed = Square(platform="triton-interpret"), Square(rows=False, platform="triton-interpret")
    assert launched(jax.vmap(kernel, (0, None)), X, WEIGHT) == {15}
    assert launched(jax.vmap(jax.vmap(kernel, (0, None)), (0, None)), X, WEIGHT) == {15}
    assert launched(gradient(jax.vmap(kernel, (0, None))), X, WEIGHT) == {15}
    # Neither weights per example nor summed gradients per example can be one: a call an example.
    assert launched(jax.vmap(kernel), X, jnp.stack([WEIGHT] * 3)) == {5}
    assert launched(jax.vmap(gradient(summed), (0, None)), X, WEIGHT) == {5, 15}


X8, INDEX, WEIGHT8 = normal(0, 2, 3, 8), jnp.arange(6).reshape(2, 3), WEIGHT[:8]


def weighed(function):
    def loss(x, weight, index):
        out, total, _ = function(x, weight, index)
        return jnp.sum(jnp.sin(out)) + jnp.sum(total**2)

    return loss


@pytest.mark.parametrize("backward", ["rows", "summed"])
def test_integer_inputs_and_outputs(backward):
    kernel, both = Opaque(backward, platform="pallas"), {}
    for name, function in (("kernel", kernel), ("reference", kernel.reference)):
        grads = jax.vmap(jax.grad(weighed(function), (0, 1)), (0, None, 0))
        calls = (lambda *a, f=function: f(*a), jax.vmap(function, (0, None, 0)), grads)
        both[name] = [quick(call)(X8, WEIGHT8, INDEX) for call in calls]
    close(both["kernel"], both["reference"])
    assert both["kernel"][0][2].dtype == jnp.int32


def test_without_a_backward_the_reference_is_differentiated(monkeypatch):
    monkeypatch.delattr(Opaque, "grad_pallas")
    # With another option, as the functions of calls are kept.
    kernel = Opaque("none", platform="pallas")
    for make in (
        lambda f: jax.grad(weighed(f), (0, 1)),
        lambda f: jax.vmap(jax.grad(weighed(f), (0, 1)), (0, None, 0)),
        lambda f: jax.grad(weighed(jax.vmap(f, (0, None, 0))), (0, 1)),
    ):
        actual, expected = (quick(make(f))(X8, WEIGHT8, INDEX) for f in (kernel, kernel.reference))
        close(actual, expected)


def test_outputs_are_named_for_checkpoint_policies():
    pytest.importorskip("triton")
    kernel = Square(platform="triton-interpret")

    def calls(policy):
        def loss(x):
            return jnp.sum(jax.checkpoint(lambda x: jnp.sin(kernel(x, WEIGHT)), policy=policy)(x))

        return str(jax.make_jaxpr(jax.grad(loss))(X)).count("custom_vmap_call[")

    # Forward and backward; and the forward again, where its output was not kept.
    assert calls(jax.checkpoint_policies.save_only_these_names("tests.square.out")) == 2
    assert calls(jax.checkpoint_policies.nothing_saveable) == 3


# The identity, whose gradient is turned round: nothing is computed forwards.
Reversal = define(
    operation="tests.reversal",
    reference=lambda self, x: x,
    run_xla=lambda self, arrays, config: arrays["x"],
    grad_xla=lambda self, arrays, outputs, cotangents, config: {"x": -cotangents["out"]},
)


def test_a_kernel_that_computes_nothing_is_seen():
    kernel, x = Reversal(), jnp.ones((3, 5))
    np.testing.assert_array_equal(jax.grad(lambda x: (2 * kernel(x)).sum())(x), jnp.full((3, 5), -2.0))
    for function in (kernel, jax.grad(lambda x: kernel(x).sum()), jax.vmap(kernel)):
        (choice,) = selections_of(function, ejx.inputs(x))
        assert choice.problem.operation == "tests.reversal"
