"""The seven tiers, each alone and in their order; the policies; the table of this process."""

import contextvars
import threading

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import ConfigCache, dispatch, Platform, UnsupportedError
from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.dispatch import Known, Tier
from tests.dispatch import toy
from tests.dispatch.toy import Fast, FastConfig, learn, OPERATION, problem, SlowConfig


def chosen(p=None, **how):
    selection = toy.chosen(p, **how)
    return selection.config, selection.tier


class Tables(dict):
    """Problem key -> configuration (or `Known`) of the platform `pallas`, by source."""

    def __init__(self, monkeypatch):
        super().__init__(user={}, shipped={}, borrowed={})
        for name in self:
            monkeypatch.setattr(
                dispatch.snapshot, f"{name}_table", lambda i, d, name=name: self.table(i, name)
            )

    def table(self, implementation, name):
        if implementation.platform is not Platform.PALLAS:
            return {}
        known = lambda config: config if isinstance(config, Known) else Known(config, origin=name)
        return {(Platform.PALLAS, key): known(config) for key, config in self[name].items()}


@pytest.fixture
def tables(monkeypatch):
    return Tables(monkeypatch)


def test_the_tiers_and_their_order(tables):
    asked = []

    def tuner(p, implementation, device):
        asked.append((p, implementation.platform, device))
        return FastConfig(6)

    assert chosen() == (FastConfig(0), Tier.HEURISTIC)
    dispatch.set_autotuner(tuner)
    tables["borrowed"][problem().key()] = FastConfig(1)
    assert chosen() == (FastConfig(1), Tier.PERSISTENT) and not asked
    tables["shipped"][problem(32).key()] = FastConfig(2)
    assert chosen() == (FastConfig(2), Tier.PERSISTENT) and not asked
    assert chosen(tuning=True) == (FastConfig(6), Tier.AUTOTUNE)
    assert asked == [(problem(), Platform.PALLAS, dispatch.device_facts())]
    tables["shipped"][problem().key()] = FastConfig(3)
    assert chosen(tuning=True) == (FastConfig(3), Tier.PERSISTENT)
    tables["user"][problem().key()] = FastConfig(4)
    assert chosen(tuning=True) == (FastConfig(4), Tier.PERSISTENT)
    learn(FastConfig(5))
    assert chosen(tuning=True) == (FastConfig(5), Tier.MEMORY)
    with ejx.overlay_cache({OPERATION: FastConfig(7)}):
        assert chosen(tuning=True) == (FastConfig(7), Tier.OVERLAY)
        assert chosen(tuning=True, config=FastConfig(8)) == (FastConfig(8), Tier.OVERRIDE)
    assert len(asked) == 1


def test_what_was_tuned_says_what_the_tuner_stored():
    stored = Known(FastConfig(5), (("forward", 0.5),), "tuned today")

    def tuner(p, implementation, device):
        dispatch.memory_cache.put(implementation.platform, p.key(), stored)
        return FastConfig(5)

    dispatch.set_autotuner(tuner)
    selection = toy.chosen(problem(), tuning=True)
    assert selection.tier is Tier.AUTOTUNE
    assert (selection.origin, selection.ms) == (stored.origin, stored.ms)


def test_a_platform_whose_every_configuration_was_denied(tables):
    tables["user"][problem().key()] = Known(None, denied="every configuration was denied: wrong dq")
    tables["shipped"][problem().key()] = FastConfig(3)
    selection = toy.chosen(problem())
    assert (selection.platform, selection.config) == (Platform.XLA, SlowConfig(0))
    assert selection.rejected[-1] == (Platform.PALLAS, "every configuration was denied: wrong dq")
    with pytest.raises(UnsupportedError, match="'pallas': every configuration was denied: wrong dq"):
        chosen(platform="pallas")
    # It says nothing of other problems, and nothing against what the user gives.
    assert chosen(problem(32)) == (FastConfig(0), Tier.HEURISTIC)
    assert chosen(config=FastConfig(1)) == (FastConfig(1), Tier.OVERRIDE)
    with ejx.overlay_cache({OPERATION: FastConfig(2)}):
        assert chosen() == (FastConfig(2), Tier.OVERLAY)


def test_an_override_is_stored_nowhere(tmp_path):
    plan = make_plan(OPERATION, config=FastConfig(7)).pin(problem())
    assert plan.select(problem()).config == FastConfig(7)
    with ejx.overlay_cache({OPERATION: FastConfig(8)}):
        make_plan(OPERATION).pin(problem())
    assert not list(dispatch.memory_cache.items()) and not list(tmp_path.rglob("*"))
    assert chosen() == (FastConfig(0), Tier.HEURISTIC)


def test_the_cache_of_this_process():
    cache, key = ConfigCache(), problem().key()
    cache.put(Platform.PALLAS, key, FastConfig(1))
    cache.put(Platform.XLA, key, Known(None, denied="wrong"))
    assert cache.get(Platform.PALLAS, key) == FastConfig(1) and cache.get(Platform.XLA, key) is None
    assert dict(cache.items())[Platform.PALLAS, key] == cache.known(Platform.PALLAS, key)
    assert cache.known(Platform.XLA, key) == Known(None, denied="wrong")
    assert (Platform.XLA, key) in cache and (Platform.XLA, problem(8).key()) not in cache
    assert len(cache) == len(dict(cache.items())) == 2
    assert [platform for platform, _ in cache.table(OPERATION, {Platform.XLA})] == [Platform.XLA]
    assert cache.table("another", {Platform.XLA, Platform.PALLAS}) == {}
    cache.clear()
    assert not len(cache) and cache.table(OPERATION, {Platform.XLA}) == {}
    for config, denied in ((None, ""), (FastConfig(1), "wrong")):
        with pytest.raises(ValueError, match="Known: expected either a config or the reason"):
            Known(config, denied=denied)


def test_the_last_tier_names_every_platform():
    with pytest.raises(UnsupportedError) as caught:
        chosen(problem(5000))
    device = dispatch.device_facts()
    assert caught.value.reasons == {
        "triton": f"needs a TPU, the device is {device.kind} ({device.backend.value})",
        "pallas": "takes T up to 100",
        "xla": "takes T up to 1000",
    }
    for platform, reason in caught.value.reasons.items():
        assert f"{platform}: {reason}" in str(caught.value)


def test_the_next_platform_is_asked_when_one_does_not_support_the_problem():
    selection = toy.chosen(problem(500))
    assert (selection.config, selection.tier) == (SlowConfig(0), Tier.HEURISTIC)
    assert [platform for platform, _ in selection.rejected] == [Platform.TRITON, Platform.PALLAS]
    # An entry of a platform that does not support the problem is no reason to use it.
    learn(FastConfig(9), problem(500))
    assert chosen(problem(500)) == (SlowConfig(0), Tier.HEURISTIC)


def test_what_a_platform_runs_by_request_alone():
    selection = toy.chosen(problem(new=True))
    assert selection.config == SlowConfig(0)
    assert (Platform.PALLAS, "takes what is new by name only") in selection.rejected
    assert chosen(problem(new=True), platform="pallas") == (FastConfig(0), Tier.HEURISTIC)
    assert chosen(problem(new=True), config=FastConfig(3)) == (FastConfig(3), Tier.OVERRIDE)
    # The tuner asks for one platform.
    snapshot = dispatch.take_snapshot(OPERATION)
    assert dispatch.select(snapshot, problem(new=True), platform=Platform.PALLAS).config == FastConfig(0)


def test_an_entry_serves_its_bucket_only():
    learn(FastConfig(9), problem(64))
    assert chosen(problem(33)) == chosen(problem(64)) == (FastConfig(9), Tier.MEMORY)
    for other in (problem(65), problem(32)):
        assert "nearest shape: D8 T64" in toy.chosen(other).origin
    assert chosen(problem(64, flag=True)) == chosen(problem(8)) == (FastConfig(0), Tier.HEURISTIC)


def test_platform_and_config_pin_the_platform():
    assert chosen(platform="xla") == (SlowConfig(0), Tier.HEURISTIC)
    assert chosen(config=SlowConfig(7)) == (SlowConfig(7), Tier.OVERRIDE)
    with pytest.raises(UnsupportedError, match="'pallas': takes T up to 100"):
        chosen(problem(500), platform="pallas")
    with pytest.raises(UnsupportedError, match="'pallas': takes T up to 100"):
        chosen(problem(500), config=FastConfig(1))
    with pytest.raises(UnsupportedError, match="'triton': needs a TPU"):
        dispatch.take_snapshot(OPERATION, platform="triton")
    with pytest.raises(
        ValueError,
        match=r"config: expected an instance of FastConfig for platform 'pallas' of tests.toy, received SlowConfig",
    ):
        dispatch.take_snapshot(OPERATION, platform="pallas", config=SlowConfig(1))
    with pytest.raises(
        ValueError,
        match=r"config: expected an instance of FastConfig or SlowConfig for tests.toy on .*, received 3",
    ):
        dispatch.take_snapshot(OPERATION, config=3)


def test_overlays_nest_and_a_problem_beats_its_operation():
    with ejx.overlay_cache({OPERATION: FastConfig(1), problem(64).key(): FastConfig(2)}):
        assert chosen(problem(64)) == (FastConfig(2), Tier.OVERLAY)
        assert chosen(problem(8)) == (FastConfig(1), Tier.OVERLAY)
        with ejx.overlay_cache({OPERATION: FastConfig(3)}):
            assert chosen(problem(8))[0] == FastConfig(3)
            assert chosen(problem(64))[0] == FastConfig(2)
        with ejx.overlay_cache({problem(8).key(): FastConfig(4)}):
            assert chosen(problem(8))[0] == FastConfig(4)
            assert chosen(problem(16))[0] == FastConfig(1)
        # A configuration of another platform's class, or of another operation, says nothing here.
        assert chosen(problem(500)) == (SlowConfig(0), Tier.HEURISTIC)
        assert chosen(problem(8))[0] == FastConfig(1)
    with ejx.overlay_cache({"flash_attention": FastConfig(1)}):
        assert chosen() == (FastConfig(0), Tier.HEURISTIC)


def test_overlays_and_policies_belong_to_their_context():
    found = {}

    def build(name):
        found[name] = chosen()[0], dispatch.current_policy()

    with ejx.overlay_cache({OPERATION: FastConfig(1)}), ejx.policy_override("heuristic"):
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=contextvars.Context().run, args=(build, "plain")),
            threading.Thread(target=context.run, args=(build, "copied")),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert found == {
        "plain": (FastConfig(0), dispatch.Policy.CACHED),
        "copied": (FastConfig(1), dispatch.Policy.HEURISTIC),
    }


def test_policies(tables):
    """For problems known to the package, to the user, to this process and to nobody: what is asked for, and a plain call."""
    dispatch.set_autotuner(lambda p, implementation, device: FastConfig(5))
    tables["shipped"][problem(64).key()] = FastConfig(2)
    tables["user"][problem(16).key()] = FastConfig(3)
    learn(FastConfig(4), problem(4))
    problems = [problem(64), problem(16), problem(4), problem(1, flag=True)]
    expected = {
        "heuristic": ([0, 0, 0, 0], [0, 0, 0, 0]),
        "cached": ([2, 3, 4, 5], [2, 3, 4, 0]),
        "tune": ([5, 3, 4, 5], [2, 3, 4, 0]),
        "force": ([5, 5, 5, 5], [2, 3, 4, 0]),
    }
    for policy, (asked_for, plain) in expected.items():
        with ejx.policy_override(policy):
            assert [chosen(p, tuning=True)[0].block for p in problems] == asked_for, policy
            assert [chosen(p)[0].block for p in problems] == plain, policy
    # A tuner with nothing to tune, or none at all: the tables serve.
    for tuner in (lambda p, implementation, device: None, None):
        dispatch.set_autotuner(tuner)
        for policy, (_, plain) in expected.items():
            with ejx.policy_override(policy):
                assert [chosen(p, tuning=True)[0].block for p in problems] == plain, policy


def test_the_policy_of_the_environment(monkeypatch):
    assert dispatch.current_policy() is dispatch.Policy.CACHED
    monkeypatch.setenv(dispatch.overlay.POLICY_VARIABLE, "heuristic")
    learn(FastConfig(3))
    assert dispatch.current_policy() is dispatch.Policy.HEURISTIC
    assert chosen() == (FastConfig(0), Tier.HEURISTIC)
    with ejx.policy_override("cached"):
        assert chosen() == (FastConfig(3), Tier.MEMORY)
    monkeypatch.setenv(dispatch.overlay.POLICY_VARIABLE, "always")
    expected = "environment variable EJKERNEL_EQX_POLICY: expected one of 'heuristic', 'cached', 'tune', 'force', received 'always'"
    with pytest.raises(ValueError, match=expected):
        dispatch.take_snapshot(OPERATION)
    with (
        pytest.raises(ValueError, match=r"^policy: expected one of 'heuristic', .* received 'sometimes'"),
        ejx.policy_override("sometimes"),
    ):
        pass


def test_what_was_measured_at_another_length_of_the_bucket_must_run_at_this_one(monkeypatch):
    def whole_blocks(config, problem, device):
        return (
            f"takes multiples of {config.block}" if config.block and problem.dim("T") % config.block else None
        )

    monkeypatch.setattr(Fast, "config_unsupported", staticmethod(whole_blocks), raising=False)
    learn(FastConfig(64), problem(64))
    plan = make_plan(OPERATION)
    assert plan.select(problem(64)).config == FastConfig(64)
    other = plan.select(problem(60))
    assert problem(60).key() == problem(64).key()
    assert (other.config, other.tier) == (FastConfig(0), Tier.HEURISTIC)


def test_threads_that_put_and_ask_at_once():
    """What was put last is known to whoever asks then, also if the answer was being put together meanwhile."""
    cache, seen = ConfigCache(), []

    class Slow(str):
        def __contains__(self, part):  # another thread puts while this one looks through the entries
            if not seen:
                seen.append(part)
                cache.put(Platform.XLA, problem(1).key(), SlowConfig(1))
            return super().__contains__(part)

    cache.put(Platform.XLA, Slow(problem(64).key()), SlowConfig(0))
    cache.table(OPERATION, (Platform.XLA,))
    assert len(cache.table(OPERATION, (Platform.XLA,))) == 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"tests.tooy": FastConfig(1)}, r"overlay_cache: expected a Problem.key\(\) or one of .*tests.toy.*received 'tests.tooy'"),
        ({OPERATION: 3}, "config: expected an instance of a frozen dataclass, received 3"),
        (5, "overlay_cache: expected a mapping .* received 5"),
    ],
)  # fmt: skip
def test_what_an_overlay_cannot_mean_is_refused(entries, message, unchecked):
    with pytest.raises(ValueError, match=message), ejx.overlay_cache(entries):
        pass
