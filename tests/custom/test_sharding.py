"""Users' kernels on a mesh: batch axes stay where they are, whether the compiler sees into the kernel or not."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import Plan
from tests.attention.dense import normal, quick
from tests.attention.test_sharding import collectives, gathered, mesh_of, MESHES
from tests.custom.kernels import close, Opaque, plain, Square

X, WEIGHT, INDEX = normal(0, 8, 2, 6), normal(1, 6), jnp.arange(16).reshape(8, 2)


def place(mesh, spec=("dp",)) -> tuple[Any, ...]:
    batch = NamedSharding(mesh, P(*spec))
    return (
        jax.device_put(X, batch),
        jax.device_put(WEIGHT, NamedSharding(mesh, P())),
        jax.device_put(INDEX, batch),
    )


def loss(function):
    def of(x, weight, index):
        out, total, _ = function(x, weight, index)
        return jnp.sum(jnp.sin(out)) + jnp.sum(total**2)

    return of


def expected():
    reference = Opaque().reference
    return quick(reference)(X, WEIGHT, INDEX), quick(jax.grad(loss(reference), (0, 1)))(X, WEIGHT, INDEX)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("backward", ["rows", "summed"])
def test_an_opaque_kernel_is_split_along_the_batch(kind, backward):
    kernel, mesh = Opaque(backward, platform="pallas"), mesh_of(kind)
    arrays = place(mesh, ("dp", "tp"))
    with jax.set_mesh(mesh):
        forward = quick(lambda *a: kernel(*a)).lower(*arrays).compile()
        gradient = quick(jax.grad(loss(kernel), (0, 1))).lower(*arrays).compile()
        out, grads = forward(*arrays), gradient(*arrays)
    assert not collectives(forward)
    # The gradient of the weight is summed over devices, whether the kernel gives it for each row or has summed its own rows: none move.
    assert collectives(gradient)["all-reduce"] > 0 and max(gathered(gradient), default=0) <= 6
    assert out[0].sharding.is_equivalent_to(arrays[0].sharding, 3)
    close((out, grads), expected())


@pytest.mark.parametrize("kind", MESHES)
def test_vmap_on_a_mesh(kind):
    kernel, mesh = Opaque(platform="pallas"), mesh_of(kind)
    arrays = place(mesh)
    call = jax.vmap(kernel, (0, None, 0))
    with jax.set_mesh(mesh):
        compiled = quick(call).lower(*arrays).compile()
        out = compiled(*arrays)
    assert not collectives(compiled)
    close(out, expected()[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("platform", ["pallas", "xla"])
def test_inside_shard_map(platform, check_vma):
    kernel, mesh = Opaque(platform=platform), mesh_of("auto", (2, 4))
    call = jax.shard_map(
        lambda *a: kernel(*a),
        mesh=mesh,
        in_specs=(P("dp"), P(), P("dp")),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    gradient = jax.jit(jax.grad(loss(call), (0, 1)))
    close((jax.jit(call)(X, WEIGHT, INDEX), gradient(X, WEIGHT, INDEX)), expected())


def test_interpreted_inside_shard_map():
    pytest.importorskip("triton")
    kernel, mesh = Square(platform="triton-interpret"), mesh_of("auto", (2, 4))
    call = jax.shard_map(lambda x, w: kernel(x, w), mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(call(x, w))), (0, 1)))
    by_formula = jax.grad(lambda x, w: jnp.sum(jnp.sin(plain(x, w))), (0, 1))
    close(gradient(X, WEIGHT), quick(by_formula)(X, WEIGHT))


@pytest.mark.parametrize("kind", MESHES)
def test_xla_is_split_by_the_compiler(kind):
    kernel, mesh = Opaque(platform="xla"), mesh_of(kind)
    arrays = place(mesh, ("dp", "tp"))
    with jax.set_mesh(mesh):
        forward = quick(lambda *a: kernel(*a)).lower(*arrays).compile()
        gradient = quick(jax.grad(loss(kernel), (0, 1))).lower(*arrays).compile()
        results = forward(*arrays), gradient(*arrays)
    assert not collectives(forward) and not collectives(gradient)["all-gather"]
    close(results, expected())


def test_what_is_chosen_for_is_the_part_of_one_device(monkeypatch):
    seen = []
    select = Plan.select

    def watch(plan, problem, *args, **kwargs):
        seen.append(problem.dim("B"))
        return select(plan, problem, *args, **kwargs)

    kernel, mesh = Opaque(platform="pallas"), mesh_of("auto")
    arrays = place(mesh)
    monkeypatch.setattr(Plan, "select", watch)
    quick(lambda *a: kernel(*a)).lower(*arrays).compile()
    assert seen[0] == 16 and seen[-1] == 4


class Decayed(ejx.CustomKernel):
    """`h_t = h_{t-1} / 2 + x_t` from `h = w`, which all rows share: a loop that carries what comes of a shared array."""

    operation: ClassVar[str] = "tests.decayed"
    inputs: ClassVar[Any] = {"x": "... T D", "w": "D"}
    outputs: ClassVar[Any] = {"out": "... D"}

    plan: ejx.Plan = eqx.field(static=True)

    def __init__(self, *, platform: str | None = None):
        self.plan = self.make_plan(platform=platform)

    def __call__(self, x: Any, w: Any) -> Any:
        return self.launch(x=x, w=w)

    def reference(self, x: Any, w: Any) -> Any:
        start = jnp.broadcast_to(w[None], (x.shape[0], x.shape[-1]))
        return jax.lax.scan(lambda h, y: (h / 2 + y, None), start, jnp.moveaxis(x, 1, 0))[0]


def test_a_loop_inside_shard_map_starts_from_a_shared_array():
    x, w, mesh = normal(0, 4, 3, 5), normal(1, 5), mesh_of("auto", (2, 4))
    kernel = Decayed(platform="xla")
    call = jax.shard_map(lambda x, w: kernel(x, w), mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    loss = lambda function: lambda x, w: jnp.sum(jnp.sin(function(x, w)))
    close(
        (jax.jit(call)(x, w), jax.jit(jax.grad(loss(call), (0, 1)))(x, w)),
        (kernel.reference(x, w), jax.grad(loss(kernel.reference), (0, 1))(x, w)),
    )
