"""Users' kernels on a mesh: batch axes stay where they are, whether the compiler sees into the kernel or not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import Plan
from tests.attention.dense import normal, quick
from tests.attention.test_sharding import collectives, gathered, mesh_of, MESHES
from tests.custom.kernels import close, define, Opaque, plain, Square

X, WEIGHT, INDEX = normal(0, 8, 2, 6), normal(1, 6), jnp.arange(16).reshape(8, 2)


def place(mesh, spec=("dp",)) -> tuple[Any, ...]:
    batch = NamedSharding(mesh, P(*spec))
    return tuple(jax.device_put((X, WEIGHT, INDEX), (batch, NamedSharding(mesh, P()), batch)))


def loss(function):
    def of(x, weight, index):
        out, total, _ = function(x, weight, index)
        return jnp.sum(jnp.sin(out)) + jnp.sum(total**2)

    return of


def expected():
    reference = Opaque().reference
    return quick(reference)(X, WEIGHT, INDEX), quick(jax.grad(loss(reference), (0, 1)))(X, WEIGHT, INDEX)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("backward, platform", [("rows", "pallas"), ("summed", "pallas"), ("rows", "xla")])
def test_a_kernel_is_split_along_the_batch(kind, backward, platform):
    """Whether it is opaque or the compiler splits it."""
    kernel, mesh = Opaque(backward, platform=platform), mesh_of(kind)
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
    with jax.set_mesh(mesh):
        compiled = quick(jax.vmap(kernel, (0, None, 0))).lower(*arrays).compile()
        out = compiled(*arrays)
    assert not collectives(compiled)
    close(out, expected()[0])


def shard_mapped(kernel, arguments, **options):
    specs = (P("dp"), P(), P("dp"))[:arguments]
    call, mesh = (lambda *a: kernel(*a)), mesh_of("auto", (2, 4))
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("dp"), **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("platform", ["pallas", "xla"])
def test_inside_shard_map(platform, check_vma):
    call = shard_mapped(Opaque(platform=platform), 3, check_vma=check_vma)
    gradient = jax.jit(jax.grad(loss(call), (0, 1)))
    close((jax.jit(call)(X, WEIGHT, INDEX), gradient(X, WEIGHT, INDEX)), expected())


def test_interpreted_inside_shard_map():
    pytest.importorskip("triton")
    call = shard_mapped(Square(platform="triton-interpret"), 2)
    gradient = lambda call: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(call(x, w))), (0, 1)))
    close(gradient(call)(X, WEIGHT), gradient(plain)(X, WEIGHT))


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


# `h_t = h_{t-1} / 2 + x_t` from `h = w`, which all rows share: a loop that carries what comes of a shared array.
Decayed = define(
    operation="tests.decayed",
    inputs={"x": "... T D", "w": "D"},
    __call__=lambda self, x, w: self.launch(x=x, w=w),
    reference=lambda self, x, w: jax.lax.scan(
        lambda h, y: (h / 2 + y, None), jnp.broadcast_to(w[None], x[:, 0].shape), jnp.moveaxis(x, 1, 0)
    )[0],
)


def test_a_loop_inside_shard_map_starts_from_a_shared_array():
    x, w, kernel = normal(0, 4, 3, 5), normal(1, 5), Decayed(platform="xla")
    gradient = lambda call: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(call(x, w))), (0, 1)))
    call = shard_mapped(kernel, 2)
    close(
        (jax.jit(call)(x, w), gradient(call)(x, w)),
        (kernel.reference(x, w), gradient(kernel.reference)(x, w)),
    )
