"""A module's plan: equality, compilation, and that nothing but the plan is read by a call."""

import builtins
import os
import pathlib
import pickle
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, dispatch, Platform
from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.attention import reference, xla
from ejkernel_eqx.dispatch.labels import kernel_scope
from tests.dispatch.toy import FastConfig, learn, OPERATION, problem, problem_of, SlowConfig
from tests.tolerances import assert_close


def tiles(block_q, block_k):
    return xla.XlaConfig(xla.XlaTile(block_q, block_k), xla.XlaTile(block_q, block_k))


TILES = tiles(16, 32)


def qkv(t=24, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, (2, t, 2, 8), dtype) for key in keys)


def known(key, config, monkeypatch):
    table = {(Platform.XLA, key): dispatch.Known(config)}
    monkeypatch.setattr(
        dispatch.snapshot, "shipped_table", lambda i, d: table if i.platform is Platform.XLA else {}
    )


def test_equality_is_what_was_asked_for_and_what_was_tuned_for_it(monkeypatch):
    key = problem_of(ejx.FlashAttention(), *qkv()).key()
    plain = ejx.FlashAttention()
    dispatch.memory_cache.put(Platform.XLA, key, TILES)
    from_memory = ejx.FlashAttention()
    dispatch.memory_cache.clear()
    known(key, TILES, monkeypatch)
    from_table = ejx.FlashAttention()
    monkeypatch.setattr(dispatch.snapshot, "shipped_table", lambda i, d: {})
    with ejx.overlay_cache({key: TILES}):
        settled = ejx.FlashAttention(tune_for=qkv())
    dispatch.set_autotuner(lambda p, implementation, device: TILES)
    with ejx.policy_override("tune"):
        tuned = ejx.FlashAttention(tune_for=qkv())
    tiers = [
        ejx.explain(module, *qkv()).choices[0].tier for module in (from_memory, from_table, settled, tuned)
    ]
    assert tiers == ["memory", "persistent", "overlay", "autotune"]
    # What is known takes no part, and so neither does where it comes from; what was tuned for a module does, from wherever it is known next.
    assert plain == from_memory == from_table != tuned
    assert hash(plain.plan) == hash(from_memory.plan) == hash(from_table.plan)
    dispatch.memory_cache.put(Platform.XLA, key, TILES)
    again = ejx.FlashAttention(tune_for=qkv())
    assert again.plan.tiers == (dispatch.Tier.MEMORY,)
    assert again == tuned and hash(again.plan) == hash(tuned.plan)
    with ejx.overlay_cache({key: TILES}):
        assert settled == ejx.FlashAttention() != plain
    with ejx.policy_override("heuristic"):
        assert ejx.FlashAttention() != plain
    # Overrides are equal whatever the tables say, as these are never asked then.
    before = ejx.FlashAttention(config=TILES)
    dispatch.memory_cache.put(Platform.XLA, key, tiles(64, 64))
    assert before == ejx.FlashAttention(config=TILES) == ejx.FlashAttention(config=TILES, tune_for=qkv())
    assert before != ejx.FlashAttention(config=tiles(16, 16))


def test_equal_modules_share_one_trace():
    traces = []

    @eqx.filter_jit
    def call(module, q, k, v):
        traces.append(module)
        return module(q, k, v)

    q, k, v = qkv()
    key = problem_of(ejx.FlashAttention(causal=True), q, k, v).key()
    dispatch.memory_cache.put(Platform.XLA, key, TILES)
    cached = ejx.FlashAttention(causal=True)
    dispatch.memory_cache.clear()
    dispatch.set_autotuner(lambda p, implementation, device: TILES)
    with ejx.policy_override("tune"):
        tuned = [ejx.FlashAttention(causal=True, tune_for=(q, k, v)) for _ in range(2)]
    first = call(cached, q, k, v)
    call(ejx.FlashAttention(causal=True), q, k, v)  # which would choose otherwise
    assert len(traces) == 1
    np.testing.assert_array_equal(first, call(tuned[0], q, k, v))
    call(tuned[1], *qkv(seed=1))
    assert len(traces) == 2
    call(ejx.FlashAttention(causal=False), q, k, v)
    assert len(traces) == 3


def test_replan_takes_effect_in_what_is_compiled_already():
    chosen = []

    @eqx.filter_jit
    def call(module, q):
        with dispatch.on_selection(lambda selection: chosen.append(selection.config)):
            return module(q, q, q)

    q, _, _ = qkv()
    module = ejx.FlashAttention(causal=True)
    expected = call(module, q)
    assert ejx.replan(module) == module and ejx.replan(module).plan is module.plan  # nothing new is known
    dispatch.memory_cache.put(Platform.XLA, problem_of(module, q, q, q).key(), TILES)
    new, copy = ejx.replan(module, module)
    assert new == copy != module and "edition" in repr(new.plan) and ejx.replan(new) == new
    assert_close(call(new, q), expected)
    assert TILES in chosen and chosen[0] != TILES
    # Modules that differed only in this are alike again, whichever comes first.
    for mixed in ((new, module), (module, new)):
        first, second = ejx.replan(*mixed)
        assert first == second == new


def test_a_call_reads_nothing_but_its_plan(monkeypatch):
    """No file, clock, environment variable, table or device, at once and under a new trace alike; and it tunes nothing."""
    q, k, v = qkv()
    module: Any = ejx.FlashAttention(causal=True)
    problem = problem_of(module, q, k, v)
    gradient = lambda q: jnp.sum(module(q, k, v))
    before = ejx.explain(module, q, k, v).choices[0]
    module(*qkv(t=20))  # what JAX and the kernels do once, they have done
    dispatch.memory_cache.put(Platform.XLA, problem.key(), TILES)
    known(problem.key(), tiles(48, 48), monkeypatch)
    dispatch.set_autotuner(lambda *_: pytest.fail("a call must not tune"))
    ours = os.path.dirname(ejx.__file__)

    def forbid(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename.startswith("<frozen"):  # `os` and the abstract mappings
                frame = frame.f_back
            assert not frame.f_code.co_filename.startswith(ours), f"a call calls {name}"
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    tables = ("user_table", "shipped_table", "borrowed_table")
    for owner, names in (
        (builtins, ("open",)),
        (os, ("stat", "open", "replace", "rename", "mkdir")),
        (pathlib.Path, ("read_text", "open", "mkdir", "is_file", "glob")),
        (time, ("perf_counter", "monotonic", "time", "perf_counter_ns")),
        (os.environ.__class__, ("__getitem__",)),
        (dispatch.snapshot, ("current_policy", "overlay_entries", "device_facts", *tables)),
    ):
        for name in names:
            forbid(owner, name)
    with ejx.overlay_cache({"flash_attention": tiles(64, 64)}), ejx.policy_override("force"):
        selection = module.plan.select(problem)
        jaxpr = jax.make_jaxpr(jax.grad(gradient))(q)
        module(q, k, v)
        with pytest.raises(AssertionError, match="a call calls"):
            make_plan("flash_attention")
    monkeypatch.undo()
    assert (repr(selection.config), selection.tier.value) == (before.config, before.tier)
    assert before.tier == "heuristic" and str(jaxpr) == str(jax.make_jaxpr(jax.grad(gradient))(q))


def test_pins_are_shown_and_used():
    q, k, v = qkv()
    dispatch.set_autotuner(lambda p, implementation, device: TILES)
    with ejx.policy_override("tune"):
        module = ejx.FlashAttention(tune_for=ejx.inputs(q, k, v, return_lse=True))
    (choice,) = ejx.explain(lambda *args: module(*args, return_lse=True), q, k, v).choices
    assert (choice.config, choice.tier, choice.platform) == (repr(TILES), "autotune", "xla")
    (choice,) = ejx.explain(module, q, k, v).choices  # the same kernels: only the lse is not given out
    assert choice.tier == "autotune"
    (choice,) = ejx.explain(module, *qkv(t=40)).choices  # a near problem, which learns from it
    assert (choice.config, choice.tier) == (repr(TILES), "persistent") and "nearest shape" in choice.origin
    (choice,) = ejx.explain(module, *(x[..., :4] for x in (q, k, v))).choices  # another problem
    assert choice.tier == "heuristic"
    (choice,) = ejx.explain(module).choices
    assert (choice.config, choice.tier) == (repr(TILES), "autotune")
    assert_close(module(q, k, v, return_lse=True)[0], ejx.FlashAttention()(q, k, v))


def test_reading_a_model_tunes_nothing(tmp_path):
    def build():
        return ejx.FlashAttention(
            causal=True, tune_for=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv())
        )

    with dispatch.no_tuning():
        ejx.save(tmp_path / "model", build())
    dispatch.set_autotuner(lambda *_: pytest.fail("a model is not tuned by being read"))
    model = ejx.load(tmp_path / "model", build)
    assert [tier.value for tier in model.plan.tiers] == ["heuristic"]
    dispatch.set_autotuner(lambda p, implementation, device: TILES)
    assert build().plan.tiers == (dispatch.Tier.AUTOTUNE,)


def test_another_implementation_is_another_plan(monkeypatch):
    registry = dispatch.KernelRegistry()
    monkeypatch.setattr(dispatch.snapshot, "kernel_registry", registry)
    registry.add(
        dispatch.Implementation("op", Platform.XLA, Backend.ANY, 0, "core", "ejkernel_eqx.attention.xla")
    )
    ours = make_plan("op")
    assert ours == make_plan("op")
    registry.add(dispatch.Implementation("op", Platform.XLA, Backend.ANY, 0, "core", reference))
    assert ours != make_plan("op")


def test_plans_survive_pickling():
    plan = make_plan(OPERATION).pin(problem())
    hash(plan)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan and hash(copy) == hash(plan) and "_hash" not in plan.__getstate__()
    assert copy.select(problem()) == plan.select(problem())
    learn(FastConfig(5))
    renewed = plan.renewed().as_edition()
    assert pickle.loads(pickle.dumps(renewed)) == renewed != plan


def test_a_plan_answers_for_one_platform_and_in_silence():
    learn(SlowConfig(3), platform=Platform.XLA)
    plan, told = make_plan(OPERATION), []
    with dispatch.on_selection(told.append):
        assert plan.select(problem()).config == FastConfig(0)
        assert plan.select(problem(), Platform.XLA).config == SlowConfig(3)
        assert not told
        with kernel_scope(plan.select(problem(), Platform.PALLAS)):
            pass
    assert [selection.platform for selection in told] == [Platform.PALLAS]
    with pytest.raises(ejx.UnsupportedError, match="'cuda': is not among the platforms that the module was"):
        plan.select(problem(), Platform.CUDA)
    with pytest.raises(ejx.UnsupportedError, match="'pallas': takes T up to 100"):
        plan.select(problem(500), Platform.PALLAS)


def test_a_renewed_plan_makes_the_same_request_of_what_is_known_now():
    dispatch.set_autotuner(lambda p, implementation, device: FastConfig(5))
    old = {
        "free": make_plan(OPERATION).pin(problem()),
        "platform": make_plan(OPERATION, platform="pallas"),
        "config": make_plan(OPERATION, config=FastConfig(7)),
        "both": make_plan(OPERATION, platform="xla", config=SlowConfig(7)),
    }
    learn(FastConfig(9))
    new = {name: plan.renewed() for name, plan in old.items()}
    found = [plan.select(problem()).config for plan in new.values()]
    assert found == [FastConfig(9), FastConfig(9), FastConfig(7), SlowConfig(7)]
    assert new["free"].pinned == {} and old["free"].select(problem()).config == FastConfig(5)
    assert new["platform"] == old["platform"] != new["platform"].as_edition()
    assert all(plan.platforms == old[name].platforms for name, plan in new.items())
    assert new["config"] == old["config"] and new["free"] != old["free"]


def test_a_pin_that_was_not_tuned_takes_no_part_in_equality():
    plan = make_plan(OPERATION)
    assert plan.pin(problem()) == plan and hash(plan.pin(problem())) == hash(plan)
    dispatch.set_autotuner(lambda p, implementation, device: FastConfig(5))
    tuned = plan.pin(problem())
    assert tuned != plan
    learn(FastConfig(5))
    assert tuned == make_plan(OPERATION).pin(problem()) and plan == make_plan(OPERATION)


def test_a_platform_that_tuning_denies_is_passed_over_from_then_on():
    def tuner(p, implementation, device):
        if implementation.platform is Platform.PALLAS:
            return dispatch.Known(None, denied="every candidate is wrong")
        return SlowConfig(4)

    dispatch.set_autotuner(tuner)
    plan = make_plan(OPERATION).pin(problem())
    selection = plan.select(problem())
    assert (selection.config, selection.tier) == (SlowConfig(4), dispatch.Tier.AUTOTUNE)
    assert selection.rejected[-1] == (Platform.PALLAS, "every candidate is wrong")
    assert plan.select(problem(8)).platform is Platform.PALLAS
    with pytest.raises(ejx.UnsupportedError, match="'pallas': every candidate is wrong"):
        make_plan(OPERATION, platform="pallas").pin(problem())
