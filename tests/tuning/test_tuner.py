"""One problem on one platform: what may win, what is denied and why, what is remembered."""

import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
import types
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform, policy_override, TuneOptions, TuningError
from ejkernel_eqx.tuning import autotune_tier, Status, tune_problem
from tests.tuning import parts, toy

QUICK = TuneOptions(samples=5, sample_ms=1.0, isolate=False, progress=False, jobs=2)
SLOW, FAST = toy.ToyConfig(20_000), toy.ToyConfig(2)


@pytest.fixture
def timed(monkeypatch):
    """The values that were timed, in place of the clock."""
    return toy.fake_clock(monkeypatch)


def forbidden(*args, **kwargs):
    raise AssertionError("nothing may be run or timed")


@pytest.fixture
def no_clock(monkeypatch):
    monkeypatch.setattr(parts.measure, "time_in_turn", forbidden)


def tune(problem=None, implementation=toy.PLANTED, options=QUICK, **kwargs):
    return tune_problem(problem or toy.problem(), implementation, options=options, **kwargs)


def reasons(result):
    return {m.config.fault: (m.status, m.reason) for m in result.measurements if m.reason}


def remembered(problem=None) -> Any:
    """The record in the user's table."""
    return parts.lookup(toy.PLANTED, problem or toy.problem(), parts.device_facts())


FAULTS = "zeros backward drifts raises nan memory unsupported shared spills"


def test_whatever_is_wrong_is_denied_and_the_fastest_right_one_wins(caplog, timed):
    problem = toy.problem(faults=FAULTS)
    with caplog.at_level(logging.INFO, "ejkernel_eqx"):
        result = tune(problem, options=dataclasses.replace(QUICK, target="sm_90"))
    assert result.config == FAST and result.heuristic == SLOW and not result.cached
    assert set(result.ms) == set(result.heuristic_ms) == {parts.FORWARD, parts.BOTH}
    assert 0 < result.ms[parts.BOTH] < result.heuristic_ms[parts.BOTH]
    found = reasons(result)
    skipped = {fault for fault, (status, _) in found.items() if status is Status.SKIPPED}
    assert skipped == {"memory", "spills"} and set(found) == set(FAULTS.split())
    words = {
        "zeros": "y is wrong: relative RMS error 1 ",
        "backward": "dx is wrong",
        "drifts": "not repeatable",
        "raises": "raises ZeroDivisionError: tile of size 0",
        "nan": "y is wrong: relative RMS error inf",
        "memory": "out of device memory",
        "unsupported": "takes no such tile",
        "shared": "232448",
        "spills": "spills ",
    }
    assert all(words[fault] in reason for fault, (_, reason) in found.items())
    assert "y is" not in found["backward"][1] and "more to say" not in found["raises"][1]
    assert sum("tile of size 0" in record.message for record in caplog.records) == 1
    assert ejx.tuned_results()[-1] is result

    record = remembered(problem)
    assert record.config == {"loops": 2, "fault": ""}
    assert {entry.config["fault"] for entry in record.denied} == set(FAULTS.split()) - {"memory"}
    assert {entry.config["loops"] for entry in record.timed} == {20_000, 2}
    assert record.ms == result.ms and set(record.errors) == {"y", "dx"}
    known = parts.memory_cache.known(Platform.XLA, problem.key())
    assert known is not None and known.config == FAST


def test_parts_are_tuned_one_after_the_other(timed):
    result = tune(implementation=toy.PARTED)
    # The winner of each part, though no candidate had both; a part's faults do not touch the other.
    assert result.config == toy.PartedConfig(toy.Tile(2), toy.Tile(1))
    status = {(m.part, m.config.block, m.config.fault): m.status for m in result.measurements if m.part}
    denied = {place for place, found in status.items() if found is Status.DENIED}
    assert denied == {("forward", 1, "zeros"), ("backward", 1, "backward")}
    timed = {("forward", 300, ""), ("forward", 2, ""), ("backward", 1, ""), ("backward", 300, "")}
    assert set(status) - denied == timed and {status[place] for place in timed} == {Status.TIMED}
    assert result.ms == {parts.FORWARD: 3.0, parts.BOTH: 3.0} and result.heuristic_ms[parts.BOTH] == 301.0


def test_only_the_results_of_the_part_are_computed():
    """XLA removes what a part does not need: a backward that would raise on the host is never called."""

    bench = parts.Bench("toy", toy.workload(toy.PARTED, toy.problem()))
    config = toy.PartedConfig(toy.Tile(1, "killed"), toy.Tile(1))
    results = bench.program(config, ("dx",))(toy.inputs(toy.problem(), 0))
    assert list(results) == ["dx"]


def test_a_configuration_that_is_no_faster_does_not_replace_the_heuristic(timed, monkeypatch):
    monkeypatch.setattr(
        toy.Planted, "default_config", staticmethod(lambda problem, device: toy.ToyConfig(200))
    )
    almost = [toy.ToyConfig(199)]
    assert tune(configs=almost).config == toy.ToyConfig(200)
    assert tune(configs=[*almost, toy.ToyConfig(197)]).config == toy.ToyConfig(197)


def test_where_the_best_was_noise_the_next_best_takes_part(timed, monkeypatch):
    """`FAST` is fast only by itself: as a whole and in turn it is slower than the heuristic."""
    usual, turns = parts.measure.time_in_turn, []

    def with_noise(works, *how, **more):
        found = usual(works, *how, **more)
        whole = [key for key in works if isinstance(key, tuple) and len(key) == 2]
        turns.append({config for config, direction in whole})
        slow = {key: found[key]._replace(ms=30_000.0) for key in whole if key[0] == FAST}
        return found | slow

    monkeypatch.setattr(parts.measure, "time_in_turn", with_noise)
    second, third = toy.ToyConfig(5), toy.ToyConfig(40)
    result = tune(configs=[FAST, second, third])
    assert result.config == second and result.ms[parts.BOTH] == 5.0
    assert [turn for turn in turns if FAST in turn] == [{FAST, SLOW}, {FAST, SLOW, second}]
    (lost,) = [c for c in parts.entry_of_result(result).candidates if c.reason]
    assert lost.config == {"loops": 2, "fault": ""} and lost.reason == parts.LOST


def test_the_second_time_nothing_is_measured(timed, monkeypatch):
    problem = toy.problem(faults="zeros raises")
    first = tune(problem)
    monkeypatch.setattr(parts.measure, "time_in_turn", forbidden)
    monkeypatch.setattr(toy, "run", forbidden)
    again = tune(problem)
    assert again.cached and again.config == first.config and dict(again.ms) == dict(first.ms)
    assert all(m.known for m in again.measurements)
    assert reasons(again) == reasons(first)
    # The same bucket of lengths is the same problem.
    assert tune(toy.problem(size=toy.SIZE - 1, faults="zeros raises")).cached
    assert first.to_record(parts.device_facts()).key == again.to_record(parts.device_facts()).key


def test_a_new_candidate_alone_is_measured(timed):
    tune(configs=[FAST, toy.ToyConfig(1, "zeros")])
    timed.clear()
    slower = tune(configs=[FAST, toy.ToyConfig(1, "zeros"), toy.ToyConfig(9)])
    assert set(timed) == {toy.ToyConfig(9)}
    assert slower.config == FAST and not slower.cached and slower.ms[parts.BOTH] == 2.0
    assert reasons(slower)["zeros"][0] is Status.DENIED
    timed.clear()
    faster = tune(configs=[FAST, toy.ToyConfig(9), toy.ToyConfig(1)])
    # The new one wins by the stored times, and is then compared with the best so far and the heuristic in turn.
    assert timed[0] == toy.ToyConfig(1) and toy.ToyConfig(9) not in timed
    assert faster.config == toy.ToyConfig(1) and faster.ms[parts.BOTH] == 1.0
    record = remembered()
    assert {entry.config["loops"] for entry in record.timed} == {20_000, 2, 9, 1}
    assert {entry.config["fault"] for entry in record.denied} == {"zeros"}


def test_force_measures_everything_anew(timed):
    problem = toy.problem(faults="raises")
    tune(problem)
    timed.clear()
    again = tune(problem, force=True)
    assert not again.cached and {SLOW, FAST} <= set(timed)
    assert not any(m.known for m in again.measurements) and set(reasons(again)) == {"raises"}


def test_the_time_budget_leaves_out_what_has_not_begun(timed):
    options = dataclasses.replace(QUICK, time_budget=1e-9)
    result = tune(options=options)
    assert result.config == SLOW and dict(result.ms) == dict(result.heuristic_ms)
    assert [(m.config, m.reason) for m in result.measurements if m.status is Status.SKIPPED] == [
        (FAST, "time budget")
    ]
    # It is not held against the candidate.
    assert tune().config == FAST


def test_at_most_so_many_candidates(timed):
    configs = [toy.ToyConfig(n) for n in range(5, 200)]
    result = tune(configs=configs * 2, options=dataclasses.replace(QUICK, max_candidates=6))
    assert {m.config.loops for m in result.measurements} == {5, 6, 7, 8, 9, 20_000}
    # The best four and the heuristic with full samples.
    assert {m.config.loops for m in result.measurements if m.status is Status.PASSED} == {9}


def test_without_a_choice_nothing_is_timed(no_clock):
    result = tune(configs=[SLOW])
    assert result.config == SLOW and result.cached and not result.measurements
    assert remembered() is None


def test_if_nothing_may_be_used_that_is_remembered(timed, monkeypatch):
    wrong = toy.ToyConfig(3, "zeros")
    monkeypatch.setattr(toy.Planted, "default_config", staticmethod(lambda problem, device: wrong))
    configs = [toy.ToyConfig(1, "raises")]
    for _ in range(2):
        with pytest.raises(
            TuningError, match=r"no candidate may be used(.|\n)*y is wrong(.|\n)*ZeroDivisionError"
        ):
            tune(configs=configs)
        monkeypatch.setattr(toy, "run", forbidden)  # the second time, nothing is tried
    record = remembered()
    assert record.config is None and len(record.denied) == 2
    known = parts.memory_cache.known(Platform.XLA, toy.problem().key())
    assert known is not None and known.config is None and "y is wrong" in known.denied


def test_right_on_the_first_inputs_alone_is_not_enough(timed):
    result = tune(configs=[toy.ToyConfig(1, "seed"), FAST])
    assert result.config == FAST
    assert reasons(result)["seed"][0] is Status.DENIED


def test_inside_a_trace_it_is_an_error(no_clock):
    def traced(x):
        with pytest.raises(TuningError, match="build or tune outside jit, or use cached"):
            tune()
        with pytest.raises(TuningError, match="outside jit"):
            autotune_tier(toy.problem(), toy.PLANTED, parts.device_facts())
        with parts.no_tuning():
            assert autotune_tier(toy.problem(), toy.PLANTED, parts.device_facts()) is None
        return x

    jax.eval_shape(traced, jnp.ones(3))
    jax.lax.scan(lambda carry, x: (traced(carry), x), jnp.ones(()), jnp.ones(2))


def test_a_bar_shows_how_far_it_is_on_a_terminal(timed, capsys, monkeypatch):
    tune(options=dataclasses.replace(QUICK, progress=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tune(options=dataclasses.replace(QUICK, progress=True), force=True)
    assert toy.OPERATION in capsys.readouterr().err
    tune(options=dataclasses.replace(QUICK, progress=False), force=True)
    assert capsys.readouterr().err == ""


def test_what_holds_while_candidates_run(timed, monkeypatch):
    """The settings of the thread, as x64 in a `with` statement, which other threads compile under; the default policy; and nothing is tuned,
    which would wait for the lock for ever."""
    seen, allowed, run, inputs = [], [], toy.run, toy.inputs

    def watched(given, config):
        seen.append((config.loops, toy.settings(), parts.current_policy()))
        return run(given, config)

    monkeypatch.setattr(toy, "run", watched)
    monkeypatch.setattr(toy, "inputs", lambda *how: (allowed.append(parts.tuning_allowed()), inputs(*how))[1])
    with jax.enable_x64(True), jax.default_matmul_precision("high"), policy_override("force"):
        tune(configs=[FAST, toy.ToyConfig(3), toy.ToyConfig(4)])
        expected = {(loops, toy.settings(), parts.Policy.CACHED) for loops in (20_000, 2, 3, 4)}
        assert set(seen) == expected and toy.settings().startswith("True strict high")
    assert allowed and not any(allowed) and parts.tuning_allowed()


def test_without_a_workload_nothing_can_be_tuned(no_clock):
    without = dataclasses.replace(toy.PLANTED, workload=None)
    assert autotune_tier(toy.problem(), without, parts.device_facts()) is None
    with pytest.raises(TuningError, match="no workload"):
        tune(implementation=without)


@pytest.fixture
def lock_file():
    path = parts.user_cache(parts.device_facts(), toy.PLANTED.core).path.with_name("tuning.lock")
    path.parent.mkdir(parents=True)
    return path


IMPATIENT = dataclasses.replace(QUICK, lock_timeout=0.05)


def test_another_process_that_tunes_is_waited_for(timed, lock_file, monkeypatch):
    tune()
    record, cache = remembered(), parts.user_cache(parts.device_facts(), toy.PLANTED.core)
    assert record is not None
    cache.clear()
    monkeypatch.setattr(parts.measure, "time_in_turn", forbidden)
    monkeypatch.setattr(parts.lock, "_FIRST", 0.01)
    other = filelock.FileLock(lock_file)

    class Listener(logging.Handler):
        """Once somebody waits, the other process is done."""

        def emit(self, entry):
            if "waiting for another process" in entry.getMessage():
                cache.put(record)
                other.release()

    listener, logger = Listener(), logging.getLogger("ejkernel_eqx")
    logger.addHandler(listener)
    try:
        with other:
            assert tune().cached
    finally:
        logger.removeHandler(listener)


def test_another_process_that_does_not_end_is_given_up(timed, lock_file):
    with filelock.FileLock(lock_file):
        with pytest.raises(TuningError, match=r"holds .*tuning\.lock.*lock_timeout"):
            tune(options=IMPATIENT)
    assert tune(options=IMPATIENT).config == FAST


def test_another_process_that_is_killed_holds_nothing(timed, lock_file):
    held = f"lock = filelock.FileLock({str(lock_file)!r}); lock.acquire()"
    program = f"import filelock, time; {held}; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    with pytest.raises(TuningError, match="lock_timeout"):
        tune(options=IMPATIENT)
    process.kill()
    process.communicate()
    assert tune(options=IMPATIENT).config == FAST


@pytest.mark.skipif(os.name != "posix", reason="POSIX links")
def test_a_planted_lock_is_not_opened(timed, lock_file, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    lock_file.symlink_to(victim)
    assert tune().config == FAST and victim.read_text() == "mine"


@pytest.mark.parametrize("step", ["compile", "run"])
def test_a_candidate_that_does_not_end_ends_the_search_here(timed, monkeypatch, step):
    """No process can be ended, so the search is."""
    release, entered = threading.Event(), threading.Event()

    def hang(*_):
        entered.set()
        assert release.wait(60)

    if step == "run":
        monkeypatch.setattr(toy, "_hung", hang)
    else:
        monkeypatch.setattr(toy, "_forward", lambda x, fault: (hang() if fault else None, 2 * x)[1])
    # An hour passes as soon as it hangs.
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * entered.is_set())
    monkeypatch.setattr(parts.ledger, "time", clock)
    before = set(threading.enumerate())
    options = dataclasses.replace(QUICK, jobs=1)
    try:
        with pytest.raises(TuningError, match=r"hangs did not finish within 120 s.*isolate=True"):
            tune(configs=[FAST, toy.ToyConfig(3), toy.ToyConfig(4, "hangs")], options=options)
        # The end of the process waits for none of the threads that are left.
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
        assert entered.is_set() and remembered() is None
    finally:
        release.set()


def test_candidates_that_raise_while_they_are_timed(timed, monkeypatch):
    usual = parts.trials._Watched.sample

    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    def sample(self, launches):
        if self.candidate.value.loops == 1:
            self.work.function = broken
        return usual(self, launches)

    monkeypatch.setattr(parts.trials._Watched, "sample", sample)
    result = tune(configs=[toy.ToyConfig(1), FAST])
    (failed,) = (m for m in result.measurements if m.config.loops == 1)
    assert result.config == FAST and failed.status is Status.DENIED
    assert failed.reason == "raises JaxRuntimeError: INTERNAL: launch failed"


def test_given_configurations_do_not_make_the_record_worse(timed):
    assert tune().config == FAST
    assert tune(configs=[toy.ToyConfig(500)]).config == FAST
    assert tune().config == FAST


@pytest.mark.parametrize("seed", [0, 1])
def test_a_reference_that_is_not_defined_says_nothing_against_candidates(timed, monkeypatch, seed):
    first = toy.inputs(toy.problem(), 0)[0]

    def reference(given):
        undefined = jnp.array_equal(given[0], first) == (seed == 0)
        return {"y": jnp.where(undefined, jnp.nan, 2 * given[0]), "dx": (2 * given[1],)}

    monkeypatch.setattr(toy, "reference", reference)
    with pytest.raises(TuningError, match=rf"the reference returns NaN in y .*seed {seed}"):
        tune()
    assert remembered() is None


def test_a_missing_tolerance_says_nothing_against_candidates(no_clock):
    def workload(*args):
        made = toy.workload(*args)
        return dataclasses.replace(made, tolerances={"y": made.tolerances["y"]})

    with pytest.raises(TuningError, match="no tolerances for dx"):
        tune(implementation=dataclasses.replace(toy.PLANTED, workload=workload))
    assert remembered() is None


def test_what_helps_to_debug_stops_no_candidate(timed):
    with jax.disable_jit(), jax.debug_nans(True), jax.transfer_guard("disallow"):
        assert tune().config == FAST


@dataclasses.dataclass(frozen=True)
class Tiles(toy.ToyConfig):
    tiles: tuple[toy.Tile, ...] = ()


FOREIGN = [
    (toy.Tile(1), r"configs: expected instances of ToyConfig.*Tile\(block=1"),
    (toy.ToyConfig(np.int64(3)), "fields that can be stored in a file"),  # type: ignore[arg-type]
    (Tiles(tiles=(toy.Tile(1),)), "fields that can be stored in a file"),
]


@pytest.mark.parametrize("config, said", FOREIGN)
def test_configurations_that_are_foreign_or_do_not_come_back_from_a_file_are_refused(no_clock, config, said):
    with pytest.raises(ValueError, match=said):
        tune(configs=[config])


LACKING = {
    "memory": (toy.FatalMemoryError("RESOURCE_EXHAUSTED: x"), r"PREALLOCATE=false.*isolate=False"),
    "disk": (OSError(28, "No space left on device"), "No space left on device"),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_the_machine_lacks_is_never_remembered(timed, monkeypatch, what):
    error, said = LACKING[what]

    def run(given, config):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(toy, "run", run)
        with pytest.raises(TuningError, match=said):
            tune()
    assert remembered() is None and tune().config == FAST


def test_an_exception_without_a_text(timed, monkeypatch):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def run(given, config):
        if config == FAST:
            raise Mute
        return toy.reference(given)

    monkeypatch.setattr(toy, "run", run)
    found = tune()
    assert found.config == SLOW and any(m.reason.startswith("raises Mute") for m in found.measurements)
