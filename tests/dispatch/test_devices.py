"""One module on several kinds of device: built under one, called on another. A GPU is played by facts alone."""

import contextlib
import dataclasses
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import _kernel, Backend, dispatch, Platform, Problem
from ejkernel_eqx.attention import xla
from ejkernel_eqx.dispatch import device, shipped
from tests.compilations import compilations
from tests.dispatch import toy
from tests.dispatch.toy import Fast, FastConfig, problem, problem_of, Slow, SlowConfig

H200 = dataclasses.replace(toy.H200, count=8)
CPU = dispatch.device_facts()
OPERATION, make_plan = "tests.places", _kernel.make_plan


@pytest.fixture
def places(monkeypatch):
    """`places(device)` is a context in which that device is the default; the process has this CPU and an H200. On the H200 alone runs
    what is written for it."""
    registry = dispatch.KernelRegistry()
    registry.add(dispatch.Implementation(OPERATION, Platform.PALLAS, Backend.GPU, 20, "core", Fast))
    registry.add(dispatch.Implementation(OPERATION, Platform.XLA, Backend.ANY, 10, "core", Slow))
    monkeypatch.setattr(dispatch.snapshot, "kernel_registry", registry)
    default = [H200]
    monkeypatch.setattr(dispatch.snapshot, "device_facts", lambda: default[-1])
    monkeypatch.setattr(
        dispatch.snapshot, "other_device_facts", lambda here: tuple(d for d in (H200, CPU) if d != here)
    )
    monkeypatch.setattr(_kernel, "place_of_calls", lambda: device.place_of(default[-1]))

    @contextlib.contextmanager
    def on(device):
        default.append(device)
        yield
        default.pop()

    return on


def of(t: int = 64) -> Problem:
    return dataclasses.replace(problem(t), operation=OPERATION)


def chosen(plan, p=None) -> Any:
    selection = plan.select(p or of())
    return selection.platform, selection.config, selection.device


def test_the_device_that_is_compiled_for_decides(places):
    with places(CPU):
        initialised = make_plan(OPERATION)
        assert chosen(initialised) == (Platform.XLA, SlowConfig(0), CPU)
        assert initialised.device.count == CPU.count
    assert chosen(initialised) == (Platform.PALLAS, FastConfig(0), H200) and initialised.device.count == 8
    built_there = make_plan(OPERATION)
    with places(CPU):
        assert chosen(built_there) == (Platform.XLA, SlowConfig(0), CPU)
    assert built_there == initialised and hash(built_there) == hash(initialised)
    assert initialised.devices == (CPU, H200) and built_there.devices == (H200, CPU)


def test_every_device_is_answered_from_its_own_tables(places, monkeypatch):
    known = {H200: FastConfig(7), CPU: SlowConfig(5)}

    def entries(implementation, device):
        config = known[device]
        fits = isinstance(config, implementation.load().config_type)
        return {(implementation.platform, of().key()): dispatch.Known(config)} if fits else {}

    monkeypatch.setattr(dispatch.snapshot, "shipped_table", entries)
    with places(CPU):
        plan = make_plan(OPERATION)
    monkeypatch.setattr(dispatch.snapshot, "shipped_table", lambda *_: pytest.fail("a call reads no table"))
    assert chosen(plan) == (Platform.PALLAS, FastConfig(7), H200)
    with places(CPU):
        assert chosen(plan) == (Platform.XLA, SlowConfig(5), CPU)


def test_what_was_asked_for_is_never_replaced(places):
    with places(CPU):
        asked = [make_plan(OPERATION, platform="pallas"), make_plan(OPERATION, config=FastConfig(3))]
        for plan in asked:
            with pytest.raises(ejx.UnsupportedError, match="'pallas': needs a GPU, the device is"):
                plan.select(of())
    assert {chosen(plan)[0] for plan in asked} == {Platform.PALLAS}
    assert [chosen(plan)[1] for plan in asked] == [FastConfig(0), FastConfig(3)]
    slow = make_plan(OPERATION, platform="xla")
    assert chosen(slow) == (Platform.XLA, SlowConfig(0), H200)


def test_what_is_tuned_is_tuned_for_one_device(places):
    dispatch.set_autotuner(
        lambda p, implementation, device: SlowConfig(9) if device is CPU else FastConfig(9)
    )
    with places(CPU):
        plan = make_plan(OPERATION, platform="xla").pin(of())
        assert plan.tiers == (dispatch.Tier.AUTOTUNE,) and chosen(plan)[1] == SlowConfig(9)
    assert plan.pinned == {} and chosen(plan)[1] == SlowConfig(0)
    assert plan != make_plan(OPERATION, platform="xla")


def test_a_chosen_platform_is_asked_on_its_device(places):
    """Around an opaque kernel the choice of the platform comes first, perhaps inside a mesh that is left when the configuration is
    chosen."""
    plan = make_plan(OPERATION)
    with places(CPU):
        assert plan.select(of(), Platform.PALLAS).config == FastConfig(0)
        assert plan.select(of(), Platform.XLA).device == CPU


def test_a_device_that_the_plan_does_not_know_is_named_once(places, monkeypatch, caplog):
    monkeypatch.setattr(_kernel, "_warned", set())
    with places(CPU):
        plan = dataclasses.replace(make_plan(OPERATION), elsewhere=())
    plan = pickle.loads(pickle.dumps(dataclasses.replace(plan, elsewhere=())))
    for _ in range(2):
        assert chosen(plan) == (Platform.XLA, SlowConfig(0), CPU)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "built for cpu is called on NVIDIA H200" in line and "ejx.replan" in line
    assert chosen(plan.renewed()) == (Platform.PALLAS, FastConfig(0), H200)


def test_the_default_device_and_the_mesh_decide():
    cpu = jax.devices("cpu")[0]
    here = (Backend.CPU, cpu.device_kind)
    assert device.place_of_calls() == here == device.place_of(dispatch.device_facts())
    with jax.default_device("cpu"):
        assert device.place_of_calls() == here
    of_gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("x",), abstract_device=of_gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert device.place_of_calls() == device.place_of(H200)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",))):
        assert device.place_of_calls() == here
    assert device.other_device_facts(H200) == (dispatch.device_facts(cpu),)
    assert device.other_device_facts(CPU) == ()


# What a model shows of its kernels, and what it is equal by


@pytest.fixture
def h200_tables(monkeypatch):
    """The tables of the package for an H200, and a process that has one."""
    monkeypatch.setattr(dispatch.snapshot, "device_facts", lambda: H200)
    monkeypatch.setattr(dispatch.snapshot, "shipped_table", shipped.shipped_table)


X = jax.ShapeDtypeStruct((4, 2, 8), jnp.float32)


class Layer(eqx.Module):
    weight: jax.Array
    attention: ejx.FlashAttention

    def __call__(self, x):
        return x + self.attention(x @ self.weight, x, x)


def layers(count: int) -> list[Layer]:
    return [Layer(jnp.full((8, 8), 0.1 * i), ejx.FlashAttention(causal=True)) for i in range(count)]


def test_a_model_prints_its_requests_and_no_table(h200_tables):
    model = layers(32)
    plan = model[0].attention.plan
    tables = plan.snapshot.shipped
    assert len(tables) > 20 and plan.snapshot.device == H200  # there is much to print
    assert repr(plan) == "Plan(flash_attention)" and len(repr(plan.snapshot)) < 80
    assert len(repr(model).splitlines()) < 32 * 12 and len(repr(model)) < 32 * 400
    assert len(str(jax.tree.structure(model))) < 32 * 400
    given = ejx.FlashAttention(platform="xla")
    assert repr(given.plan) == "Plan(flash_attention, on xla)" and "Plan(flash_attention, on xla)" in repr(
        given
    )
    pinned = given.plan.pin(problem_of(given, X, X, X))
    assert repr(pinned) == "Plan(flash_attention, on xla, pinned 1)"


def test_what_is_built_before_and_after_tables_change_fits_together():
    """Layers stack and scan, and an optimiser's state of before takes gradients of after."""
    x = jnp.linspace(-1, 1, 2 * 4 * 2 * 8).reshape(2, 4, 2, 8)
    before = layers(2)
    optimiser = optax.sgd(0.1, momentum=0.9)
    state = optimiser.init(eqx.filter(before, eqx.is_array))
    tuned = xla.XlaConfig(xla.XlaTile(2, 2), xla.XlaTile(2, 2))
    dispatch.memory_cache.put(Platform.XLA, problem_of(before[0].attention, X, X, X).key(), tuned)
    after = layers(2)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert before[0].attention.plan.answers != after[0].attention.plan.answers
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), before[1], after[1])
    assert jax.lax.scan(lambda x, layer: (layer(x), None), x, stacked)[0].shape == x.shape
    gradients = eqx.filter_grad(lambda model: jnp.sum(model[1](model[0](x))))(after)
    updates, _ = optimiser.update(gradients, state)
    moved = eqx.apply_updates(after, updates)
    np.testing.assert_allclose(
        moved[1].weight, after[1].weight - 0.1 * gradients[1].weight, rtol=1e-5, atol=1e-6
    )


def test_layers_called_outside_of_jit_use_what_their_own_plans_know():
    x = jnp.linspace(-1, 1, 2 * 4 * 16).reshape(2, 4, 16)
    build = lambda: ejx.nn.MultiHeadAttention(16, num_heads=2, platform="xla", key=jax.random.key(0))
    before = build()
    key = problem_of(before, x).key()
    with compilations():
        before(x)
    tuned = xla.XlaConfig(xla.XlaTile(2, 2), xla.XlaTile(2, 2))
    dispatch.memory_cache.put(Platform.XLA, key, tuned)
    with compilations() as programs:
        results = before(x), build()(x)
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    assert [name for name in programs if "_program" in name] == ["jit(_program)"]
