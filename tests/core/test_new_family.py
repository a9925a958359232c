"""What follows from a family's declaration: gradients, mapped calls, steps, meshes, on a family that the package does not know."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arrays import array
from tests.core.leaky import Arrays, LeakyIntegrator, reference, step, StepArrays
from tests.meshes import context, HEADS, mesh_of, place, ROWS
from tests.tolerances import assert_close

platforms = pytest.mark.parametrize("platform", ["xla", "triton-interpret"])


def operands(*lead: int, length: int = 7, channels: int = 6) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x, initial = rng.normal(size=(*lead, length, channels)), rng.normal(size=(*lead, channels))
    return tuple(np.asarray(a, np.float32) for a in (x, rng.uniform(size=channels), initial))


def exact(*given: np.ndarray) -> tuple[np.ndarray, ...]:
    """The results, and the gradients of `loss`, in float64."""
    with jax.enable_x64(True):
        call = functools.partial(everything, lambda *a: reference(Arrays(*a)))
        return tuple(map(np.asarray, jax.jit(call)(*(array(a, jnp.float64) for a in given))))


def loss(out, final):
    return (out**2).sum() + (final**3).sum()


def everything(op, *given):
    return (*op(*given), *jax.grad(lambda *a: loss(*op(*a)), argnums=(0, 1, 2))(*given))


def assert_exact(found, given):
    for n, (x, y) in enumerate(zip(found, exact(*given), strict=True)):
        assert_close(x, y, kind="forward" if n < 2 else "gradient")


@pytest.mark.few(2)
@platforms
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)])
def test_results_and_gradients(platform, lead):
    given = operands(*lead)
    assert_exact(jax.jit(everything)(LeakyIntegrator(platform), *given), given)


@pytest.mark.few(1)
@platforms
def test_mapped_calls_are_one_launch(platform):
    op, given = LeakyIntegrator(platform), operands(2, 3)
    mapped = jax.vmap(lambda x, decay, initial: op(x, decay, initial), in_axes=(1, None, 1), out_axes=1)
    assert_close(jax.jit(mapped)(*given)[0], exact(*given)[0])
    each = jax.vmap(lambda *a: jax.grad(lambda *a: loss(*op(*a)), argnums=1)(*a), in_axes=(0, None, 0))
    wanted = [exact(given[0][n], given[1], given[2][n])[3] for n in range(2)]
    assert_close(jax.jit(each)(*given), np.stack(wanted), kind="gradient")
    text = str(jax.make_jaxpr(mapped)(*given))
    assert text.count("ejkernel_interpret") == (platform == "triton-interpret")


@pytest.mark.few(1)
@platforms
def test_a_step_is_one_token(platform):
    op, (x, decay, state) = LeakyIntegrator(platform), operands(5)
    whole = exact(x, decay, state)[0]
    for t in range(x.shape[1]):
        out, state = jax.jit(op.step)(x[:, t], decay, state)
        assert_close(out, whole[:, t])
    gradient = lambda call: jax.jit(jax.grad(lambda *a: loss(*call(*a)), argnums=(0, 1, 2)))
    found, wanted = (
        gradient(call)(x[:, 0], decay, state) for call in (op.step, lambda *a: step(StepArrays(*a)))
    )
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.few(2)
@platforms
@pytest.mark.parametrize("kind", ["explicit", "explicit without context"])
def test_split_over_a_mesh(platform, kind):
    P = jax.sharding.PartitionSpec
    given, mesh = operands(4), mesh_of(kind)
    specs = (P(ROWS, None, HEADS), P(HEADS), P(ROWS, HEADS))
    with context(kind, mesh):
        found = jax.jit(everything)(LeakyIntegrator(platform), *place(mesh, given, specs))
    assert_exact(found, given)
    for x, spec in zip(found, (specs[0], specs[2], *specs), strict=True):
        assert x.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), x.ndim)


def test_a_gradient_that_a_platform_forgets_is_not_zero(monkeypatch):
    op, given = LeakyIntegrator("triton-interpret"), operands(2, length=3)
    platform = op.plan.snapshot.implementations[0].load()
    whole = platform.backward
    forgetful = lambda *args: {name: x for name, x in whole(*args).items() if name != "decay"}
    monkeypatch.setattr(platform, "backward", forgetful)
    with pytest.raises(KeyError, match="decay"):
        jax.grad(lambda *a: loss(*op(*a)), argnums=1)(*given)
