"""Attention on a mesh: batch and heads stay where they are, on platforms the compiler sees into and on those it does not."""

import dataclasses
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.cases import xla_tiles
from tests.attention.dense import normal, quick
from tests.attention.inner import AttentionGrads, Backend, Implementation, Platform, reference, with_plan, xla
from tests.meshes import collectives as collectives
from tests.tolerances import assert_close

MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def gathered(compiled) -> list[int]:
    """The sizes of what is gathered."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", compiled.as_text() or "")
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


def _forward(arrays, spec, config):
    return reference.attend(arrays, spec)


def _backward(arrays, spec, config, out, lse, dout, dlse):
    names = [n for n in AttentionGrads._fields if getattr(arrays, n) is not None]
    function = lambda given: reference.attend(arrays._replace(**given), spec)
    _, vjp = jax.vjp(function, {n: getattr(arrays, n) for n in names})
    return AttentionGrads(**vjp((dout, dlse))[0])


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
OPAQUE = types.SimpleNamespace(
    OPAQUE=True,
    forward=_forward,
    backward=_backward,
    default_config=xla.default_config,
    unsupported=xla.unsupported,
    config_type=xla.XlaConfig,
)


def opaque(**options) -> Any:
    module = ejx.FlashAttention(**options)
    implementation = Implementation("flash_attention", Platform.PALLAS, Backend.ANY, 100, "attention", OPAQUE)
    snapshot = dataclasses.replace(module.plan.snapshot, implementations=(implementation,))
    return with_plan(module, dataclasses.replace(module.plan, snapshot=snapshot))


def mesh_of(kind: str, shape=(4, 2)) -> Any:
    return jax.make_mesh(shape, ("dp", "tp"), axis_types=(MESHES[kind],) * 2)


def problem(kv_heads=4, heads=8, batch=4, t=16) -> dict[str, Any]:
    return dict(
        q=normal(0, batch, t, heads, 8),
        k=normal(1, batch, t, kv_heads, 8),
        v=normal(2, batch, t, kv_heads, 8),
        sinks=normal(3, heads),
        alibi_slopes=normal(4, heads) / 10,
        bias=normal(5, batch, heads, 1, t),
    )


def place(mesh, arrays, tp: int = 2) -> dict[str, Any]:
    specs = dict(q=P("dp", None, "tp"), sinks=P(), alibi_slopes=P(), bias=P("dp", "tp"))
    specs["k"] = specs["v"] = specs["q"] if arrays["k"].shape[2] % tp == 0 else P("dp")
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


def on(platform: str) -> Any:
    if platform == "triton-interpret":
        pytest.importorskip("triton")
        return ejx.FlashAttention(causal=True, platform=platform)
    return (
        opaque(causal=True)
        if platform == "opaque"
        else ejx.FlashAttention(config=xla_tiles(8, 8), causal=True)
    )


def compared(call: Any, arrays: dict[str, Any], sharded: dict[str, Any], mesh: Any) -> tuple[Any, ...]:
    """The compiled call and its compiled gradient on a mesh, and their results, which agree with those on one device."""
    forward, backward = quick(call), quick(jax.grad(lambda a: jnp.sum(jnp.sin(call(a)))))
    with jax.set_mesh(mesh):
        programs = forward.lower(sharded).compile(), backward.lower(sharded).compile()
        out, grads = (program(sharded) for program in programs)
    assert_close(out, forward(arrays))
    for name, gradient in backward(arrays).items():
        assert_close(grads[name], gradient, kind="gradient", name=name)
    return *programs, out, grads


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("platform", ["opaque", "xla"])
@pytest.mark.parametrize("kv_heads", [8, 4, 1])
def test_it_is_split_where_it_stands(kind, platform, kv_heads):
    arrays, mesh = problem(kv_heads), mesh_of(kind)
    if platform == "xla":
        arrays = {name: arrays[name] for name in ("q", "k", "v", "bias")}
    sharded, module = place(mesh, arrays), on(platform)
    forward, backward, out, grads = compared(lambda a: module(**a), arrays, sharded, mesh)
    assert not collectives(forward)
    # Sinks and slopes are on every device: their gradients, a number a head, are summed and gathered. A lone key head is read
    # by all devices, so that its gradient cannot be split by heads.
    if kv_heads > 1:
        allowed = {"all-reduce", "all-gather"} if platform == "opaque" else set()
        assert set(collectives(backward)) <= allowed and max(gathered(backward), default=0) <= 8
    assert out.sharding.is_equivalent_to(sharded["q"].sharding, 4)
    for name in ("q", "k", "v"):
        assert grads[name].sharding.is_equivalent_to(sharded[name].sharding, 4), name


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MESHES)
def test_plain_operands_need_no_collective_in_the_backward_either(kind):
    arrays, mesh = {name: x for name, x in problem().items() if name in "qkv"}, mesh_of(kind)
    module = opaque(causal=True)
    _, backward, *_ = compared(lambda a: module(**a), arrays, place(mesh, arrays), mesh)
    assert not collectives(backward)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MESHES)
def test_more_devices_than_key_heads(kind):
    """Four devices along the heads and two key heads: they cannot be split evenly, and the numbers stay right."""
    arrays, mesh, module = problem(kv_heads=2, batch=2), mesh_of(kind, (2, 4)), opaque(causal=True)
    compared(lambda a: module(**a), arrays, place(mesh, arrays, tp=4), mesh)


def test_what_cannot_be_split_is_gathered():
    """A split sequence, or a batch that does not divide, costs a collective and no correctness."""
    arrays = {name: x for name, x in problem().items() if name in "qkv"}
    module, mesh = opaque(causal=True), mesh_of("auto")
    expected = quick(lambda a: module(**a))(arrays)
    sequence = {name: jax.device_put(x, NamedSharding(mesh, P(None, "dp"))) for name, x in arrays.items()}
    compiled = quick(lambda a: module(**a)).lower(sequence).compile()
    assert collectives(compiled)["all-gather"] > 0
    assert_close(compiled(sequence), expected)
    several = opaque(causal=True)
    nested = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in arrays.items()}
    rows = {name: jax.device_put(x, NamedSharding(mesh, P(None, "tp"))) for name, x in nested.items()}
    compiled = quick(lambda a: several(**a)).lower(rows).compile()
    assert not collectives(compiled)
    assert_close(compiled(rows).reshape(expected.shape), expected)


def test_vmap_on_a_mesh():
    arrays = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in problem().items() if name in "qkv"}
    module, mesh = opaque(causal=True), mesh_of("auto", (2, 4))
    call = jax.vmap(jax.vmap(lambda a: module(**a)))
    sharded = {
        name: jax.device_put(x, NamedSharding(mesh, P("dp", None, None, "tp"))) for name, x in arrays.items()
    }
    compiled = quick(call).lower(sharded).compile()
    assert not collectives(compiled)
    assert_close(compiled(sharded), quick(call)(arrays))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("platform", ["opaque", "xla"])
@pytest.mark.parametrize("shape", [(1, 2), (4, 1, 2)], ids=str)
def test_a_bias_of_some_leading_axes(kind, platform, shape):
    """Each device reads its part of it, and the gradient is summed over what it lacks."""
    lead, heads = (4, 2, 2)[: len(shape)], 2
    arrays = {name: normal(n, *lead, 8, heads, 8) for n, name in enumerate("qkv")}
    arrays["bias"] = normal(3, *shape, heads, 8, 8)
    mesh, module = mesh_of(kind), on(platform)
    split = lambda x: P(
        *(axis if size != 1 else None for axis, size in zip(("dp", "tp"), x.shape, strict=False))
    )
    sharded = {name: jax.device_put(x, NamedSharding(mesh, split(x))) for name, x in arrays.items()}
    forward, backward, *_ = compared(lambda a: module(**a), arrays, sharded, mesh)
    assert not collectives(forward) and set(collectives(backward)) <= {"all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, check_vma", [("opaque", False), ("opaque", True), ("xla", True), ("triton-interpret", True)]
)
def test_inside_shard_map(platform, check_vma):
    arrays, module, mesh = problem(), on(platform), mesh_of("auto", (2, 4))
    call: Any = lambda a: module(**a)
    specs = dict.fromkeys("qkv", P("dp", None, "tp")) | dict.fromkeys(("sinks", "alibi_slopes"), P("tp"))
    specs["bias"] = P("dp", "tp")
    options: Any = dict(in_specs=(specs,), out_specs=P("dp", None, "tp"), check_vma=check_vma)
    mapped: Any = jax.shard_map(call, mesh=mesh, **options)
    assert_close(jax.jit(mapped)(arrays), quick(call)(arrays))
    gradient, expected = (
        jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(of(a)))))(arrays)  # noqa: B023
        for of in (mapped, call)
    )
    for name in arrays:
        assert_close(gradient[name], expected[name], kind="gradient", name=name)


def test_where_only_some_axes_are_manual():
    """XLA's own operations are split as elsewhere; around an opaque kernel all axes must be manual."""
    arrays, mesh = {name: x for name, x in problem().items() if name in "qkv"}, mesh_of("auto")

    def mapped(module: Any) -> Any:
        specs: Any = {"in_specs": P("dp"), "out_specs": P("dp"), "axis_names": {"dp"}, "check_vma": False}
        return jax.shard_map(lambda a: module(**a), mesh=mesh, **specs)

    transparent: Any = ejx.FlashAttention(causal=True, platform="xla")
    sharded = place(mesh, arrays)
    assert_close(jax.jit(mapped(transparent))(sharded), quick(lambda a: transparent(**a))(arrays))
    loss = lambda call: lambda a: jnp.sum(jnp.sin(call(a)))
    gradient = jax.jit(jax.grad(loss(mapped(transparent))))(sharded)
    expected = quick(jax.grad(loss(lambda a: transparent(**a))))(arrays)
    for name in arrays:
        assert_close(gradient[name], expected[name], kind="gradient", name=name)
    with pytest.raises(ValueError, match=r"all axes .* manual .* received \['tp'\] .* axis_names"):
        jax.jit(mapped(opaque(causal=True)))(sharded)
