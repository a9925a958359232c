"""Two implementations of one platform, each for its own kind of device, side by side."""

import dataclasses
from typing import Any

import equinox as eqx
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, dispatch, Platform, Problem
from ejkernel_eqx.dispatch.labels import label_of
from tests.dispatch.toy import FastConfig, H200, hooks, SlowConfig

OPERATION = "tests.backends"
CPU = DeviceFacts(Backend.CPU, "cpu")
PROBLEM = Problem.make(OPERATION, dims={"T": 64}, dtypes={"x": "float32"}, flags={}, lengths={"T"})


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    block: int


@pytest.fixture
def registry(monkeypatch) -> dispatch.KernelRegistry:
    """`pallas` for GPUs and for CPUs, in place of what is registered."""
    made = dispatch.KernelRegistry()
    made.register(OPERATION, "pallas", Backend.GPU, priority=20)(hooks(FastConfig(1)))
    made.register(OPERATION, "pallas", Backend.CPU, priority=20)(hooks(SlowConfig(2)))
    made.register(OPERATION, "xla", priority=10)(hooks(OtherConfig(3)))
    monkeypatch.setattr(ejx.kernel_registry, "_table", made._table)
    monkeypatch.setattr(dispatch.snapshot, "_latest", {})
    return made


def on(device: DeviceFacts, monkeypatch: Any, **how: Any) -> dispatch.Snapshot:
    monkeypatch.setattr(dispatch.snapshot, "device_facts", lambda: device)
    return dispatch.take_snapshot(OPERATION, **how)


def test_each_runs_on_its_own_device(registry, monkeypatch):
    assert [i.backend.value for i in registry.ordered(OPERATION)] == ["cpu", "gpu", "any"]
    for device, config in ((H200, FastConfig(1)), (CPU, SlowConfig(2))):
        for how in ({}, {"platform": "pallas"}, {"config": dataclasses.replace(config, block=7)}):
            chosen = dispatch.select(on(device, monkeypatch, **how), PROBLEM)
            assert chosen.platform is Platform.PALLAS and chosen.implementation.backend is device.backend
            assert chosen.config == how.get("config", config) and chosen.rejected == ()
    with pytest.raises(ValueError, match=r"config: expected an instance of OtherConfig or SlowConfig for"):
        on(CPU, monkeypatch, config=FastConfig(1))
    with pytest.raises(ValueError, match=r"an instance of SlowConfig for platform 'pallas'"):
        on(CPU, monkeypatch, config=FastConfig(1), platform="pallas")


def test_where_neither_runs_both_are_named(registry, monkeypatch):
    tpu = DeviceFacts(Backend.TPU, "TPU v5p")
    chosen = dispatch.select(on(tpu, monkeypatch), PROBLEM)
    assert chosen.platform is Platform.XLA
    assert dict(chosen.rejected) == {
        "pallas on cpu": "needs a CPU, the device is TPU v5p (tpu)",
        "pallas on gpu": "needs a GPU, the device is TPU v5p (tpu)",
    }
    with pytest.raises(ejx.UnsupportedError) as error:
        on(tpu, monkeypatch, platform="pallas")
    assert set(error.value.reasons) == {"pallas on cpu", "pallas on gpu"}


def test_a_plan_is_the_same_wherever_it_is_made(registry, monkeypatch):
    """Its platforms are asked for, and which of two counts is a matter of the device."""
    requests = {on(device, monkeypatch).request for device in (H200, CPU)}
    asked = {on(device, monkeypatch, platform="pallas").request for device in (H200, CPU)}
    assert len(requests) == len(asked) == 1
    here, *_ = dispatch.take_snapshots(OPERATION)
    plan = ejx.Plan(here)
    assert plan.platforms == (Platform.PALLAS, Platform.XLA)
    assert plan.select(PROBLEM, platform=Platform.PALLAS).config == SlowConfig(2)


def test_what_is_known_is_that_of_the_device(registry, monkeypatch):
    fits = lambda i, device: {} if i.backend in (Backend.ANY, device.backend) else pytest.fail()
    monkeypatch.setattr(dispatch.snapshot, "shipped_table", fits)
    dispatch.memory_cache.put(
        Platform.PALLAS, PROBLEM.key(), dispatch.Known(SlowConfig(5), (("forward", 1.0),), "tuned")
    )
    chosen = dispatch.select(on(CPU, monkeypatch), PROBLEM)
    assert (chosen.config, chosen.tier) == (SlowConfig(5), dispatch.Tier.MEMORY)


def test_only_the_same_place_is_replaced(registry):
    first = registry.get(OPERATION, "pallas")
    assert first.backend is dispatch.device_facts().backend is Backend.CPU
    registry.register(OPERATION, "pallas", Backend.GPU, priority=99)(hooks(FastConfig(9)))
    registry.register(OPERATION, "pallas", Backend.CPU, priority=19)(hooks(SlowConfig(9)))
    assert len(registry.ordered(OPERATION)) == 3 and registry.get(OPERATION, "pallas") is first
    assert registry.get(OPERATION, "pallas", "gpu").hooks.default_config(PROBLEM, H200) == FastConfig(9)
    with pytest.raises(
        ValueError, match=r"expected one of \['pallas', 'xla'\] for .* 'pallas' on backend 'tpu'"
    ):
        registry.get(OPERATION, "pallas", "tpu")
    # One for every device takes the place of those that it outranks; of equals the latest.
    for priority, found in ((19, SlowConfig(2)), (20, OtherConfig(20)), (21, OtherConfig(21))):
        registry.register(OPERATION, "pallas", priority=priority)(hooks(OtherConfig(priority)))
        assert registry.get(OPERATION, "pallas").hooks.default_config(PROBLEM, CPU) == found
        assert dispatch.select(dispatch.take_snapshot(OPERATION), PROBLEM).config == found


def test_explain_names_both(registry):
    assert [(row.platform, bool(row.rejected)) for row in ejx.explain(OPERATION).choices] == [
        ("pallas on cpu (usable)", False),
        ("pallas on gpu (unusable)", True),
        ("xla (usable)", False),
    ]


def test_labels_of_both_are_read(registry):
    cpu, gpu, _ = registry.ordered(OPERATION)

    def read(implementation, config):
        selection = dispatch.Selection(PROBLEM, implementation, config, dispatch.Tier.HEURISTIC, ())
        (found,) = ejx.labels_to_configs([label_of(selection)])
        return found

    for implementation, config in ((cpu, SlowConfig(4)), (gpu, FastConfig(4))):
        found = read(implementation, config)
        assert (found.platform, found.config) == ("pallas", config)
    strange = read(cpu, OtherConfig(4))
    assert strange.config is None and "does not fit" in strange.reason


def test_a_kernel_class_that_changes_its_device_leaves_nothing_behind():
    for backend in (Backend.GPU, Backend.CPU):

        class Same(ejx.CustomKernel):
            operation = "tests.backends.same"
            inputs = {"x": "... N"}  # noqa: RUF012
            outputs = {"out": "... N"}  # noqa: RUF012
            backends = {Platform.PALLAS: backend}  # noqa: RUF012
            plan: ejx.Plan = eqx.field(static=True)

            def __init__(self, *, platform=None):
                self.plan = self.make_plan(platform=platform)

            def __call__(self, x):
                return self.launch(x=x)

            def reference(self, x):
                return x

            def run_pallas(self, arrays, config):
                return {"out": arrays["x"]}

        known = ejx.kernel_registry.ordered(Same.operation)
        assert [i.backend for i in known if i.platform is Platform.PALLAS] == [backend]
