"""One problem on one platform: what may win, what is denied and why, what is remembered."""

import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
import types

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import TuningError
from ejkernel_eqx.dispatch import (
    BOTH,
    device_facts,
    FORWARD,
    memory_cache,
    no_tuning,
    Platform,
    tuning_allowed,
)
from ejkernel_eqx.dispatch.persistent import lookup, user_cache
from ejkernel_eqx.tuning import (
    autotune_tier,
    ledger,
    lock,
    measure,
    Status,
    tune_problem,
    tuned_results,
    TuneOptions,
    tuner,
    tuning_options,
)
from ejkernel_eqx.tuning.report.data import entry_of_result, LOST
from tests.tuning import toy
from tests.tuning.scaling import nothing_in_memory

QUICK = TuneOptions(samples=5, sample_ms=1.0, isolate=False, progress=False, jobs=2)
SLOW, FAST = toy.ToyConfig(20_000), toy.ToyConfig(2)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    with nothing_in_memory():
        yield


@pytest.fixture
def timed(monkeypatch):
    """The values that were timed, in place of the clock."""
    return toy.fake_clock(monkeypatch)


def forbidden(*args, **kwargs):
    raise AssertionError("nothing may be run or timed")


@pytest.fixture
def no_clock(monkeypatch):
    monkeypatch.setattr(measure, "time_in_turn", forbidden)


def tune(problem=None, implementation=toy.PLANTED, options=QUICK, **kwargs):
    return tune_problem(problem or toy.problem(), implementation, options=options, **kwargs)


def reasons(result):
    return {m.config.fault: (m.status, m.reason) for m in result.measurements if m.reason}


FAULTS = "zeros backward drifts raises nan memory unsupported shared spills"


def test_whatever_is_wrong_is_denied_and_the_fastest_right_one_wins(caplog, timed):
    problem = toy.problem(faults=FAULTS)
    with caplog.at_level(logging.INFO, "ejkernel_eqx"):
        result = tune(problem, options=dataclasses.replace(QUICK, target="sm_90"))
    assert result.config == FAST and result.heuristic == SLOW and not result.cached
    assert set(result.ms) == set(result.heuristic_ms) == {FORWARD, BOTH}
    assert 0 < result.ms[BOTH] < result.heuristic_ms[BOTH]
    found = reasons(result)
    assert {fault for fault, (status, _) in found.items() if status is Status.SKIPPED} == {"memory", "spills"}
    assert found["memory"][1] == "out of device memory"
    assert found["spills"][1].startswith("spills ")
    assert "y is wrong: relative RMS error 1 " in found["zeros"][1]
    assert found["backward"][1].startswith("dx is wrong") and "y is" not in found["backward"][1]
    assert "not repeatable" in found["drifts"][1]
    assert found["raises"][1] == "raises ZeroDivisionError: tile of size 0"
    assert "y is wrong: relative RMS error inf" in found["nan"][1]
    assert found["unsupported"][1] == "takes no such tile"
    assert "232448" in found["shared"][1] and "shared memory" in found["shared"][1]
    assert set(found) == set(FAULTS.split())
    assert sum("tile of size 0" in record.message for record in caplog.records) == 1
    assert tuned_results()[-1] is result

    record = lookup(toy.PLANTED, problem, device_facts())
    assert record is not None and record.config == {"loops": 2, "fault": ""}
    assert {entry.config["fault"] for entry in record.denied} == set(FAULTS.split()) - {"memory"}
    assert {entry.config["loops"] for entry in record.timed} == {20_000, 2}
    assert record.ms == result.ms and set(record.errors) == {"y", "dx"}
    known = memory_cache.known(Platform.XLA, problem.key())
    assert known is not None and known.config == FAST


def test_parts_are_tuned_one_after_the_other(timed):
    result = tune(implementation=toy.PARTED)
    # The winner of each part, though no candidate had both; a part's faults do not touch the other.
    assert result.config == toy.PartedConfig(toy.Tile(2), toy.Tile(1))
    status = {(m.part, m.config.block, m.config.fault): m.status for m in result.measurements if m.part}
    assert status == {
        ("forward", 300, ""): Status.TIMED,
        ("forward", 1, "zeros"): Status.DENIED,
        ("forward", 2, ""): Status.TIMED,
        ("backward", 1, ""): Status.TIMED,
        ("backward", 1, "backward"): Status.DENIED,
        ("backward", 300, ""): Status.TIMED,
    }
    assert result.ms == {FORWARD: 3.0, BOTH: 3.0} and result.heuristic_ms[BOTH] == 301.0


def test_only_the_results_of_the_part_are_computed():
    """XLA removes what a part does not need: a backward that would raise on the host is never called."""
    from ejkernel_eqx.tuning.bench import Bench

    bench = Bench("toy", toy.workload(toy.PARTED, toy.problem()))
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
    usual, turns = measure.time_in_turn, []

    def with_noise(works, *how, **more):
        found = usual(works, *how, **more)
        whole = [
            key for key in works if isinstance(key, tuple) and len(key) == 2
        ]  # (configuration, direction)
        turns.append({config for config, _ in whole})
        return {
            key: timing._replace(ms=30_000.0) if key in whole and key[0] == FAST else timing
            for key, timing in found.items()
        }

    monkeypatch.setattr(measure, "time_in_turn", with_noise)
    second, third = toy.ToyConfig(5), toy.ToyConfig(40)
    result = tune(configs=[FAST, second, third])
    assert result.config == second and result.ms[BOTH] == 5.0
    assert [turn for turn in turns if FAST in turn] == [{FAST, SLOW}, {FAST, SLOW, second}]
    (lost,) = [c for c in entry_of_result(result).candidates if c.reason]
    assert lost.config == {"loops": 2, "fault": ""} and lost.reason == LOST


def test_the_second_time_nothing_is_measured(timed, monkeypatch):
    problem = toy.problem(faults="zeros raises")
    first = tune(problem)
    monkeypatch.setattr(measure, "time_in_turn", forbidden)
    monkeypatch.setattr(toy, "run", forbidden)
    again = tune(problem)
    assert again.cached and again.config == first.config and dict(again.ms) == dict(first.ms)
    assert all(m.known for m in again.measurements)
    assert reasons(again) == reasons(first)
    # The same bucket of lengths is the same problem.
    assert tune(toy.problem(size=toy.SIZE - 1, faults="zeros raises")).cached
    assert first.to_record(device_facts()).key == again.to_record(device_facts()).key


def test_a_new_candidate_alone_is_measured(timed):
    tune(configs=[FAST, toy.ToyConfig(1, "zeros")])
    timed.clear()
    slower = tune(configs=[FAST, toy.ToyConfig(1, "zeros"), toy.ToyConfig(9)])
    assert set(timed) == {toy.ToyConfig(9)}
    assert slower.config == FAST and not slower.cached and slower.ms[BOTH] == 2.0
    assert reasons(slower)["zeros"][0] is Status.DENIED
    timed.clear()
    faster = tune(configs=[FAST, toy.ToyConfig(9), toy.ToyConfig(1)])
    # The new one wins by the stored times, and is then compared with the best so far and the heuristic in turn.
    assert timed[0] == toy.ToyConfig(1) and toy.ToyConfig(9) not in timed
    assert faster.config == toy.ToyConfig(1) and faster.ms[BOTH] == 1.0
    record = lookup(toy.PLANTED, toy.problem(), device_facts())
    assert record is not None
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
    assert [m.config.loops for m in sorted(result.measurements, key=lambda m: m.config.loops)] == [
        5,
        6,
        7,
        8,
        9,
        20_000,
    ]
    # The best four and the heuristic with full samples.
    assert {m.config.loops for m in result.measurements if m.status is Status.PASSED} == {9}


def test_without_a_choice_nothing_is_timed(no_clock):
    result = tune(configs=[SLOW])
    assert result.config == SLOW and result.cached and not result.measurements
    assert lookup(toy.PLANTED, toy.problem(), device_facts()) is None


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
    record = lookup(toy.PLANTED, toy.problem(), device_facts())
    assert record is not None and record.config is None and len(record.denied) == 2
    known = memory_cache.known(Platform.XLA, toy.problem().key())
    assert known is not None and known.config is None and "y is wrong" in known.denied


def test_too_little_memory_is_never_remembered(timed, monkeypatch):
    lacking = toy.ToyConfig(3, "memory")
    monkeypatch.setattr(toy.Planted, "default_config", staticmethod(lambda problem, device: lacking))
    with pytest.raises(TuningError, match=r"XLA_PYTHON_CLIENT_PREALLOCATE=false.*isolate=False"):
        tune(configs=[toy.ToyConfig(1, "memory")])
    assert lookup(toy.PLANTED, toy.problem(), device_facts()) is None


def test_right_on_the_first_inputs_alone_is_not_enough(timed):
    result = tune(configs=[toy.ToyConfig(1, "seed"), FAST])
    assert result.config == FAST
    assert reasons(result)["seed"][0] is Status.DENIED


def test_inside_a_trace_it_is_an_error(no_clock):
    def traced(x):
        with pytest.raises(TuningError, match="build or tune outside jit, or use cached"):
            tune()
        with pytest.raises(TuningError, match="outside jit"):
            autotune_tier(toy.problem(), toy.PLANTED, device_facts())
        with no_tuning():
            assert autotune_tier(toy.problem(), toy.PLANTED, device_facts()) is None
        return x

    jax.eval_shape(traced, jnp.ones(3))
    jax.lax.scan(lambda carry, x: (traced(carry), x), jnp.ones(()), jnp.ones(2))


def test_a_bar_shows_how_far_it_is(timed, capsys):
    tune(options=dataclasses.replace(QUICK, progress=True))
    assert toy.OPERATION in capsys.readouterr().err
    tune(options=dataclasses.replace(QUICK, progress=False), force=True)
    assert capsys.readouterr().err == ""


def test_under_vmap_it_tunes(timed):
    def mapped(x):
        with tuning_options(**dataclasses.asdict(QUICK)):
            known = autotune_tier(toy.problem(), toy.PLANTED, device_facts())
            assert known is not None and known.config == FAST
        return x

    jax.vmap(mapped)(jnp.ones(3))
    assert timed


def test_settings_of_the_thread_hold_while_compiling(timed, monkeypatch):
    """x64 in a `with` statement is known to one thread alone; candidates are compiled by others."""
    seen = []
    original = toy.run

    def run(given, config):
        seen.append((config.loops, toy.settings()))
        return original(given, config)

    monkeypatch.setattr(toy, "run", run)
    with jax.enable_x64(True), jax.default_matmul_precision("high"):
        tune(configs=[FAST, toy.ToyConfig(3), toy.ToyConfig(4)])
        assert set(seen) == {(loops, toy.settings()) for loops in (20_000, 2, 3, 4)}
        assert toy.settings().startswith("True strict high")


def test_several_processes_never_tune_by_themselves(no_clock, monkeypatch, caplog):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(tuner, "_said", set())
    for _ in range(2):
        assert autotune_tier(toy.problem(), toy.PLANTED, device_facts()) is None
    assert sum("ejx.tune" in record.message for record in caplog.records) == 1
    without = dataclasses.replace(toy.PLANTED, workload=None)
    assert autotune_tier(toy.problem(), without, device_facts()) is None
    with pytest.raises(TuningError, match="no workload"):
        tune(implementation=without)


def test_tuning_changes_no_inputs_and_no_results(timed, monkeypatch):
    given = toy.inputs(toy.problem(), 0)
    before = [np.array(x) for x in given]
    untuned = jax.jit(toy.run, static_argnums=1)(given, FAST)
    monkeypatch.setattr(toy, "inputs", lambda problem, seed: given)
    assert tune().config == FAST
    for x, kept in zip(given, before, strict=True):
        assert not x.is_deleted()
        np.testing.assert_array_equal(x, kept)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(toy.run, static_argnums=1)(given, FAST), untuned)


def test_another_process_that_tunes_is_waited_for(timed, caplog, monkeypatch):
    tune()
    record = lookup(toy.PLANTED, toy.problem(), device_facts())
    cache = user_cache(device_facts(), toy.PLANTED.core)
    cache.clear()
    assert record is not None
    monkeypatch.setattr(measure, "time_in_turn", forbidden)
    monkeypatch.setattr(lock, "_FIRST", 0.01)
    other = filelock.FileLock(cache.path.with_name("tuning.lock"))
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if "waiting for another process" in record.getMessage():
                said.set()

    def tunes():
        with other:
            held.set()
            assert said.wait(30)
            cache.put(record)

    held, listener = threading.Event(), Listener()
    logging.getLogger("ejkernel_eqx").addHandler(listener)
    thread = threading.Thread(target=tunes)
    thread.start()
    try:
        assert held.wait(30) and tune().cached
    finally:
        logging.getLogger("ejkernel_eqx").removeHandler(listener)
        thread.join()


def test_another_process_that_does_not_end_is_given_up(timed):
    path = user_cache(device_facts(), toy.PLANTED.core).path.with_name("tuning.lock")
    path.parent.mkdir(parents=True)
    options = dataclasses.replace(QUICK, lock_timeout=0.05)
    with filelock.FileLock(path), pytest.raises(TuningError, match=r"holds .*tuning\.lock.*lock_timeout"):
        tune(options=options)
    assert tune(options=options).config == FAST


def test_another_process_that_is_killed_holds_nothing(timed):
    path = user_cache(device_facts(), toy.PLANTED.core).path.with_name("tuning.lock")
    path.parent.mkdir(parents=True)
    program = f"import filelock, time; lock = filelock.FileLock({str(path)!r}); lock.acquire(); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    options = dataclasses.replace(QUICK, lock_timeout=0.05)
    with pytest.raises(TuningError, match="lock_timeout"):
        tune(options=options)
    process.kill()
    process.communicate()
    assert tune(options=options).config == FAST


@pytest.mark.skipif(os.name != "posix", reason="POSIX links")
def test_a_planted_lock_is_not_opened(timed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = user_cache(device_facts(), toy.PLANTED.core).path.with_name("tuning.lock")
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
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
    monkeypatch.setattr(ledger, "time", clock)
    before = threading.enumerate()
    options = dataclasses.replace(QUICK, jobs=1)
    try:
        with pytest.raises(TuningError, match=r"hangs did not finish within 120 s.*isolate=True"):
            tune(configs=[FAST, toy.ToyConfig(3), toy.ToyConfig(4, "hangs")], options=options)
        # The end of the process waits for none of the threads that are left.
        assert entered.is_set() and all(
            thread.daemon for thread in threading.enumerate() if thread not in before
        )
        assert lookup(toy.PLANTED, toy.problem(), device_facts()) is None
    finally:
        release.set()


def test_a_folder_that_cannot_be_written_stops_nothing(timed, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(file / "cache"))
    assert tune().config == FAST
    assert tune().cached


def test_candidates_that_raise_while_they_are_timed(timed, monkeypatch):
    original = measure.JaxWork.sample

    def sample(self, launches):
        if "broken" in flags and self.function is programs.get(1):
            raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")
        return original(self, launches)

    flags, programs = {"broken"}, {}
    from ejkernel_eqx.tuning.bench import Bench

    compile_program = Bench.program

    def program(self, config, names, runs=1):
        compiled = compile_program(self, config, names, runs)
        programs[config.loops] = compiled
        return compiled

    monkeypatch.setattr(Bench, "program", program)
    monkeypatch.setattr(measure.JaxWork, "sample", sample)
    result = tune(configs=[toy.ToyConfig(1), FAST])
    assert result.config == FAST
    (failed,) = (m for m in result.measurements if m.config.loops == 1)
    assert (
        failed.status is Status.DENIED and failed.reason == "raises JaxRuntimeError: INTERNAL: launch failed"
    )


@pytest.mark.parametrize(
    "changes", [{"time_budget": 0}, {"samples": 0}, {"jobs": 0}, {"max_candidates": 0}, {"sample_ms": -1.0}]
)
def test_options_say_what_they_expect(changes):
    with pytest.raises(ValueError, match=f"TuneOptions.{next(iter(changes))}: expected"):
        with tuning_options(**changes):
            pass


def test_a_foreign_configuration_is_refused(no_clock):
    with pytest.raises(ValueError, match=r"configs: expected instances of ToyConfig.*Tile\(block=1"):
        tune(configs=[toy.Tile(1)])


def test_the_callers_listeners_hear_nothing_of_candidates(timed, monkeypatch):
    from ejkernel_eqx.dispatch import current_policy, Policy, policy_override

    seen = []
    original = toy.run
    monkeypatch.setattr(toy, "run", lambda *a: (seen.append(current_policy()), original(*a))[1])
    with policy_override("force"):
        tune()
    assert set(seen) == {Policy.CACHED}


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
    assert lookup(toy.PLANTED, toy.problem(), device_facts()) is None


def test_a_missing_tolerance_says_nothing_against_candidates(no_clock):
    def workload(*args):
        made = toy.workload(*args)
        return dataclasses.replace(made, tolerances={"y": made.tolerances["y"]})

    with pytest.raises(TuningError, match="no tolerances for dx"):
        tune(implementation=dataclasses.replace(toy.PLANTED, workload=workload))
    assert lookup(toy.PLANTED, toy.problem(), device_facts()) is None


def test_nothing_is_tuned_while_tuning(timed, monkeypatch):
    """Inputs that another kernel makes: its own tuning would wait for the lock for ever."""
    made, allowed = toy.inputs, []

    def inputs(problem, seed):
        allowed.append(tuning_allowed())
        return made(problem, seed)

    monkeypatch.setattr(toy, "inputs", inputs)
    tune()
    assert allowed and not any(allowed) and tuning_allowed()


def test_what_helps_to_debug_stops_no_candidate(timed):
    with jax.disable_jit(), jax.debug_nans(True), jax.transfer_guard("disallow"):
        assert tune().config == FAST


@dataclasses.dataclass(frozen=True)
class Tiles(toy.ToyConfig):
    tiles: tuple[toy.Tile, ...] = ()


@pytest.mark.parametrize("config", [toy.ToyConfig(np.int64(3)), Tiles(tiles=(toy.Tile(1),))])  # type: ignore[arg-type]
def test_configurations_that_do_not_come_back_from_a_file_are_refused(no_clock, config):
    with pytest.raises(ValueError, match="fields that can be stored in a file"):
        tune(configs=[config])


def test_a_full_disk_is_never_remembered(timed, monkeypatch):
    def run(given, config):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(toy, "run", run)
        with pytest.raises(TuningError, match="No space left on device"):
            tune()
    assert tune().config == FAST


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
