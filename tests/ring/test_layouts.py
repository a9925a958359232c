"""Where arrays lie, and what moves between devices, by the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.dense import normal, qkv
from tests.meshes import collectives, lies
from tests.ring.calls import AXIS, mesh_of
from tests.tolerances import assert_close

SPEC = P("data", AXIS, "model")


def placed(mesh: Any, spec: P, **sizes: int) -> dict[str, Any]:
    arrays = qkv(2, **sizes)
    return {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, x in arrays.items()}


def loss(module: Any, **options: Any) -> Any:
    return lambda arrays: jnp.sum(module(**arrays, **options).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("kind", ["explicit", pytest.param("automatic", marks=pytest.mark.slow)])
def test_batch_tokens_and_heads_stay_where_they_are(kind):
    mesh = mesh_of(kind, 2, data=2, model=2)
    arrays = placed(mesh, SPEC, t=16, s=16)
    module = ejx.RingAttention(AXIS, causal=True, method="ring", platform="xla")
    flash = ejx.FlashAttention(causal=True, platform="xla")
    compiled = jax.jit(jax.value_and_grad(loss(module))).lower(arrays).compile()
    value, grads = compiled(arrays)
    used = collectives(compiled)
    # Of keys and values once forward and once backward, which may be the same for two devices; and of their gradients, there and back. The
    # loss is a sum.
    assert used.pop("collective-permute") in (6, 8)
    assert set(used) <= {"all-reduce"}
    expected = jax.jit(jax.value_and_grad(loss(flash)))(qkv(2, t=16, s=16))
    assert_close(value, expected[0])
    for name, gradient in grads.items():
        assert lies(gradient, mesh, SPEC), name
        assert_close(gradient, expected[1][name], kind="gradient", name=name)
    assert lies(jax.jit(lambda a: module(**a))(arrays), mesh, SPEC)


@pytest.mark.parametrize(
    "options, moved",
    [
        # Of keys and of values one hop; or the first, and those of a loop.
        (dict(sliding_window=3), {"collective-permute": 2}),
        pytest.param({}, {"collective-permute": 4}, marks=pytest.mark.slow),
        pytest.param(dict(method="all_to_all"), {"all-to-all": 4}, marks=pytest.mark.slow),
    ],
)
def test_what_moves(options, moved):
    """Hops that see nothing are not made; an exchange moves each array once."""
    arrays = placed(mesh_of("explicit", 8), P(None, AXIS), t=32, s=32, heads=8, kv_heads=8)
    given: dict[str, Any] = dict(causal=True, method="ring", platform="xla") | options
    module: Any = ejx.RingAttention(AXIS, **given)
    assert collectives(jax.jit(lambda a: module(**a)).lower(arrays).compile()) == moved


@pytest.mark.slow
def test_memory_of_a_device_falls_with_their_number(optimised):
    """The same tokens over twice the devices: half of everything, forward and backward, and never all keys on one."""

    def temporary(devices: int) -> int:
        mesh = mesh_of("explicit", devices)
        x = jax.ShapeDtypeStruct((1, 65536, 2, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, AXIS)))
        module = ejx.RingAttention(AXIS, causal=True, order="zigzag", method="ring", platform="xla")
        lowered = jax.jit(jax.grad(loss(module))).lower({"q": x, "k": x, "v": x})
        return optimised(lowered).memory_analysis().temp_size_in_bytes

    assert temporary(8) <= 0.6 * temporary(4)


@pytest.mark.slow
def test_composes_with_jax():
    """`vmap`, `checkpoint` and `scan` over layers together, on an explicit mesh."""
    pytest.importorskip("triton")
    mesh = mesh_of("explicit", 2)
    spec = P(None, None, AXIS)
    weights = normal(5, 2, 16, 16) / 4
    x = normal(6, 2, 2, 8, 2, 16)

    def model(module: Any) -> Any:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            q = jnp.einsum("abthd,de->abthe", x, weight)
            return x + jax.vmap(module)(q, x, x), None

        run = lambda x, weights: jax.lax.scan(jax.checkpoint(layer), x, weights)[0]
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(run(*args))), argnums=(0, 1)))

    flash = model(ejx.FlashAttention(causal=True, platform="xla"))(x, weights)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    ring = model(ejx.RingAttention(AXIS, causal=True, method="ring", platform="triton-interpret"))
    value, grads = ring(put(x, spec), put(weights, P()))
    assert_close(value, flash[0])
    assert lies(grads[0], mesh, spec)
    for gradient, expected in zip(grads, flash[1], strict=True):
        assert_close(gradient, expected, kind="gradient")


def test_the_reason_for_a_form_is_explained():
    arrays = placed(mesh_of("explicit", 2), P(None, AXIS), t=16, s=16)
    module = lambda **options: ejx.RingAttention(AXIS, causal=True, **options)
    said = lambda **options: str(ejx.explain(module(**options), *arrays.values()))
    assert "all-to-all over 2 devices of axis 'sequence': 16 queries for each key are too few" in said()
    assert "ring over 2 devices of axis 'sequence', as requested" in said(method="ring")
    assert "the window reaches few devices" in said(sliding_window=3)


@pytest.mark.parametrize("devices", [(1,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_what_jits_remember_is_of_one_mesh(devices):
    """The same module on meshes of any size, and without one."""
    module: Any = ejx.RingAttention(AXIS, causal=True)
    arrays: dict[str, Any] = qkv(2, t=16, s=16)
    expected = ejx.FlashAttention(causal=True)(**arrays, return_lse=True)
    meshes = [mesh_of(kind, number) for kind in ("explicit", "automatic") for number in devices]
    for given in (*(placed(mesh, P(None, AXIS), t=16, s=16) for mesh in meshes), arrays):
        for found, wanted in zip(module(**given, return_lse=True), expected, strict=True):
            assert_close(found, wanted)
