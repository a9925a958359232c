"""Which platform is taken where tables know how long several take."""

import dataclasses
import pickle

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch, Platform
from ejkernel_eqx._kernel import make_plan
from tests.dispatch.toy import chosen, Fast, FastConfig, OPERATION, problem, Slow, SlowConfig

KEY, SIZES = problem().key(), problem().dims
CONFIGS = {Platform.PALLAS: FastConfig(3), Platform.XLA: SlowConfig(4)}


def known(platform: Platform, sizes=SIZES, **ms: float) -> dispatch.Known:
    times = tuple(
        (dispatch.BOTH if name == "both" else dispatch.FORWARD, value) for name, value in ms.items()
    )
    return dispatch.Known(CONFIGS[platform], times, "measured", sizes=sizes)


def learn(**of: dispatch.Known) -> None:
    for name, what in of.items():
        dispatch.memory_cache.put(Platform(name), KEY, what)


def test_the_fastest_measured_one_goes_first():
    assert chosen().platform is Platform.PALLAS
    learn(pallas=known(Platform.PALLAS, both=1.19))
    assert chosen().platform is Platform.PALLAS
    learn(xla=known(Platform.XLA, both=1.0))
    taken = chosen()
    assert (taken.platform, taken.config, taken.tier) == (Platform.XLA, SlowConfig(4), dispatch.Tier.MEMORY)
    assert dict(taken.rejected)["pallas"] == "measured 1.19 times as slow as xla, forward+backward"
    assert taken.ms == ((dispatch.BOTH, 1.0),) and taken.origin == "measured"
    # Another problem, of which nothing is known; one platform alone in question; a platform, a configuration that was asked for.
    assert chosen(problem(8, causal=True)).platform is Platform.PALLAS
    assert dispatch.select(
        dispatch.take_snapshot(OPERATION), problem(), platform=Platform.PALLAS
    ).config == FastConfig(3)
    assert chosen(platform="pallas").config == FastConfig(3)
    assert chosen(config=FastConfig(9)).config == FastConfig(9)


@pytest.mark.parametrize(
    "pallas, xla, wins",
    [
        ({"both": 2.0, "forward": 1.0}, {"both": 1.0, "forward": 2.0}, Platform.XLA),  # both decide
        ({"both": 1.0, "forward": 2.0}, {"both": 2.0, "forward": 1.0}, Platform.PALLAS),
        ({"forward": 2.0}, {"both": 9.0, "forward": 1.0}, Platform.XLA),
        ({"both": 2.0}, {"forward": 1.0}, Platform.PALLAS),  # nothing to compare by
        ({"both": 2.0}, {}, Platform.PALLAS),
        ({}, {"both": 1.0}, Platform.PALLAS),  # it may be faster still
        ({"both": 1.005}, {"both": 1.0}, Platform.PALLAS),  # noise
    ],
)
def test_what_is_compared(pallas, xla, wins):
    learn(pallas=known(Platform.PALLAS, **pallas), xla=known(Platform.XLA, **xla))
    assert chosen().platform is wins


def test_only_the_same_work_is_compared():
    """A key stands for a range of lengths: a time of 33 tokens says nothing about one of 64."""
    near = (("D", 8), ("T", 33))
    for pallas, xla in ((SIZES, near), (near, SIZES), ((), ())):
        learn(pallas=known(Platform.PALLAS, pallas, both=2.0), xla=known(Platform.XLA, xla, both=1.0))
        assert chosen().platform is Platform.PALLAS
    learn(pallas=known(Platform.PALLAS, near, both=2.0), xla=known(Platform.XLA, near, both=1.0))
    assert chosen().platform is Platform.XLA


def test_the_nearest_shape_at_which_both_were_timed_decides_where_nothing_is_known(monkeypatch):
    learn(pallas=known(Platform.PALLAS, both=1.5), xla=known(Platform.XLA, both=1.0))
    taken = chosen(problem(100))
    assert (taken.platform, taken.config, taken.ms) == (Platform.XLA, SlowConfig(4), ())
    assert dict(taken.rejected)["pallas"] == (
        "measured 1.50 times as slow as xla at the nearest shape, D8 T64, forward+backward"
    )
    assert chosen(problem(1)).platform is Platform.XLA
    dispatch.memory_cache.clear()
    for platform, ms in ((Platform.PALLAS, 1.5), (Platform.XLA, 1.0)):
        dispatch.memory_cache.put(platform, problem(100).key(), known(platform, both=ms))
    assert chosen(problem(1)).platform is Platform.PALLAS and chosen(problem(2)).platform is Platform.XLA
    dispatch.memory_cache.clear()
    learn(pallas=known(Platform.PALLAS, both=1.5), xla=known(Platform.XLA, both=1.0))
    # Of a nearer shape one platform is known alone, which does not compare them.
    dispatch.memory_cache.put(Platform.PALLAS, problem(16).key(), known(Platform.PALLAS, both=9.0))
    assert chosen(problem(16)).platform is Platform.PALLAS
    assert chosen(problem(32)).platform is Platform.XLA
    # What would not run here was not timed here.
    refused = lambda config, problem, device: "needs another device" if config == SlowConfig(4) else None
    monkeypatch.setattr(Slow, "config_unsupported", staticmethod(refused), raising=False)
    assert chosen(problem(100)).platform is Platform.PALLAS
    with ejx.overlay_cache({OPERATION: FastConfig(7)}):
        assert chosen(problem(100)).config == FastConfig(7)


def test_times_of_the_nearest_device_decide_where_this_one_has_none():
    times = {Platform.PALLAS: 1.5, Platform.XLA: 1.0}
    table = {(platform, KEY): known(platform, both=ms) for platform, ms in times.items()}
    borrowed = dataclasses.replace(dispatch.take_snapshot(OPERATION), borrowed=table)
    for length in (64, 100):
        taken = dispatch.select(borrowed, problem(length))
        assert (taken.platform, taken.ms) == (Platform.XLA, ())
    learn(pallas=known(Platform.PALLAS, both=1.0), xla=known(Platform.XLA, both=1.2))
    here = dataclasses.replace(dispatch.take_snapshot(OPERATION), borrowed=table)
    assert dispatch.select(here, problem(100)).platform is Platform.PALLAS
    assert len({s.answers for s in (borrowed, here, dispatch.take_snapshot(OPERATION))}) == 3


def test_the_direction_that_is_asked_for_decides():
    learn(
        pallas=known(Platform.PALLAS, both=1.0, forward=1.0), xla=known(Platform.XLA, both=2.0, forward=0.5)
    )
    for length in (64, 100):
        ways = (dispatch.FORWARD, dispatch.BOTH)
        forward, both = (make_plan(OPERATION).select(problem(length), direction=way) for way in ways)
        assert both.platform is Platform.PALLAS and forward.platform is Platform.XLA
        reason = dict(forward.rejected)["pallas"]
        assert "2.00 times as slow as xla" in reason and reason.endswith("forward")
    before = make_plan(OPERATION).as_edition()
    learn(xla=known(Platform.XLA, both=2.0, forward=1.5))
    assert before != make_plan(OPERATION).as_edition()


def test_times_of_what_would_not_run_decide_nothing(monkeypatch):
    learn(pallas=known(Platform.PALLAS, both=2.0), xla=known(Platform.XLA, both=1.0))
    assert chosen().platform is Platform.XLA
    with ejx.policy_override("heuristic"):
        assert chosen().platform is Platform.PALLAS
    for mine in (FastConfig(7), SlowConfig(7)):  # of which nothing was measured
        with ejx.overlay_cache({OPERATION: mine}):
            assert chosen().platform is Platform.PALLAS
    # Another length of the same key; and denied.
    assert chosen(problem(40)).platform is Platform.XLA
    learn(xla=dispatch.Known(None, denied="wrong"))
    assert chosen().platform is Platform.PALLAS
    learn(xla=known(Platform.XLA, both=1.0))
    monkeypatch.setattr(Fast, "unsupported", staticmethod(lambda problem, device: "is not for this"))
    assert dict(chosen().rejected)["pallas"] == "is not for this"


def test_an_order_is_part_of_what_a_plan_knows():
    """Plans stay equal, as configurations that are known keep them; an edition differs if another platform would be taken."""
    learn(pallas=known(Platform.PALLAS, both=1.0), xla=known(Platform.XLA, both=2.0))
    before = make_plan(OPERATION)
    learn(pallas=known(Platform.PALLAS, both=1.1))  # measured again, to the same effect
    again = make_plan(OPERATION)
    learn(pallas=known(Platform.PALLAS, both=4.0))
    after = make_plan(OPERATION)
    assert before == again == after
    assert before.as_edition() == again.as_edition() != after.as_edition()
    platforms = [plan.select(problem()).platform for plan in (before, again, after)]
    assert platforms == [Platform.PALLAS, Platform.PALLAS, Platform.XLA]
    assert pickle.loads(pickle.dumps(after)).select(problem()).platform is Platform.XLA


def test_what_is_measured_for_a_module_itself_counts_in_it():
    learn(xla=known(Platform.XLA, both=1.0))
    plan = make_plan(OPERATION)
    dispatch.set_autotuner(lambda problem, implementation, device: known(implementation.platform, both=1.5))
    tuned = plan.pin(problem())
    taken = tuned.select(problem())
    assert (taken.platform, taken.config) == (Platform.XLA, SlowConfig(4))
    assert plan.select(problem()).platform is Platform.PALLAS
    dispatch.set_autotuner(lambda problem, implementation, device: known(implementation.platform, both=0.5))
    assert plan.pin(problem()).select(problem()).platform is Platform.PALLAS
