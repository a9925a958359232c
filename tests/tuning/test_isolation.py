"""What a candidate does to its process, and what then becomes of the search."""

import dataclasses
import logging
import signal
import time

import jax
import pytest

from ejkernel_eqx import Platform, TuneOptions, TuningError
from ejkernel_eqx.tuning import Status, tune_problem
from tests.tuning import parts, toy
from tests.tuning.parts import ledger as ledger_module

QUICK = TuneOptions(samples=5, sample_ms=1.0, progress=False, jobs=2)


@pytest.mark.slow
def test_everything_that_can_go_wrong_at_once(monkeypatch):
    """What is wrong, in part or in every second run, what raises, what is too large, what hangs and what kills its process, once with another
    process left behind: the best of the rest wins. Children compute under the settings that hold here."""
    pytest.importorskip("triton")
    words = {
        "zeros": "y is wrong",
        "backward": "dx is wrong",
        "drifts": "not repeatable",
        "raises": "ZeroDivisionError",
        "shared": "shared memory",
        "killed": "killed its process: SIGKILL",
        "orphans": "killed its process: SIGKILL",
        "hangs": "did not finish within 6 s",
    }
    problem = toy.problem(faults=" ".join(words))
    options = dataclasses.replace(QUICK, isolate=True, candidate_timeout=6.0, target="sm_90")
    with jax.enable_x64(True), jax.default_matmul_precision("high"):
        monkeypatch.setenv(toy.SETTINGS_VARIABLE, toy.settings())
        result = tune_problem(problem, toy.PLANTED, options=options)
    assert result.config == toy.ToyConfig(2) and result.ms[parts.BOTH] < result.heuristic_ms[parts.BOTH]
    found = {m.config.fault: (m.status, m.reason) for m in result.measurements if m.reason}
    assert set(found) == set(words) and {status for status, _ in found.values()} == {Status.DENIED}
    assert all(words[fault] in reason for fault, (_, reason) in found.items())
    record = parts.lookup(toy.PLANTED, problem, parts.device_facts())
    assert record is not None and {d.config["fault"] for d in record.denied} == set(words)


# --- Without processes: children that say what a list says, and then die or live on


A, B, C = (toy.ToyConfig(n) for n in (1, 2, 3))


def begun(config):
    return parts.Begun(parts.Candidate("", config), "compile")


def timed(config):
    return parts.Measured(parts.Measurement("", config, Status.TIMED, ms=1.0))


@pytest.fixture
def children(monkeypatch):
    """Scripts, one for each child to come; and the jobs that the children were given."""
    scripts, jobs = [], []

    class Child:
        def __init__(self, job):
            jobs.append(job)
            self.script = scripts.pop(0)

        def follow(self, ledger, limit):
            for event in self.script:
                if event == "late":
                    now = time.monotonic()
                    monkeypatch.setattr(ledger_module.time, "monotonic", lambda now=now: now + limit + 1)
                    return True
                ledger.take(event)
            return False

        def death(self):
            return f"killed its process: {signal.SIGSEGV.name}"

        def last_words(self):
            return "Its last words:\nFatal Python error"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(parts.isolation, "_Child", Child)
    return scripts, jobs


def search(options=QUICK):
    stages, here = (parts.Stage("", (), (A, B, C)),), parts.device_facts()
    job = parts.Job(toy.problem(), toy.PLANTED, here, A, stages, (), None, options, 60.0)
    with parts.Ledger(job) as ledger:
        parts.isolation.search_isolated(job, ledger)
    return {m.config: m.reason for m in ledger.measurements}


def test_if_several_were_compiling_they_compile_one_by_one(children):
    scripts, jobs = children
    scripts += [
        [begun(A), parts.Ended(parts.Candidate("", A)), begun(B), begun(C)],
        [timed(A), begun(B), parts.Ended(parts.Candidate("", B)), begun(C)],
        [timed(B), parts.Finished(B)],
    ]
    assert search() == {A: "", B: "", C: "killed its process: SIGSEGV"}
    assert [job.options.jobs for job in jobs] == [2, 1, 2]
    assert [{m.config for m in job.known} for job in jobs] == [set(), set(), {A, C}]


def test_one_that_takes_too_long_is_denied_and_the_others_are_not(children):
    scripts, jobs = children
    scripts += [[begun(A), timed(A), begun(B), "late"], [timed(C), parts.Finished(C)]]
    assert search()[B] == "did not finish within 120 s"
    assert [job.options.jobs for job in jobs] == [2, 2]


def test_a_device_that_a_candidate_has_spoilt_is_left_to_its_process(children):
    denied = parts.Measured(
        parts.Measurement("", B, Status.DENIED, "raises JaxRuntimeError: illegal address")
    )
    scripts, jobs = children
    scripts += [[timed(A), begun(B), denied, parts.Unsound("B")], [timed(C), parts.Finished(C)]]
    assert "illegal address" in search()[B]
    assert {m.config for m in jobs[1].known} == {A, B}


def test_a_death_outside_any_candidate_ends_the_search(children):
    scripts, _ = children
    scripts += [[begun(A), timed(A)]]
    with pytest.raises(TuningError, match=r"SIGSEGV, outside any candidate(.|\n)*Fatal Python error"):
        search()


def test_what_another_process_cannot_do_is_done_here_or_refused(children, caplog, monkeypatch):
    scripts, _ = children
    scripts += [[parts.Failed("ModuleNotFoundError: No module named 'far'")]] * 2
    monkeypatch.setattr(parts.tuner, "_said", set())
    toy.fake_clock(monkeypatch)
    triton = dataclasses.replace(toy.PLANTED, platform=Platform.TRITON)
    with pytest.raises(TuningError, match=r"isolate=True.*No module named 'far'"):
        tune_problem(toy.problem(), triton, options=dataclasses.replace(QUICK, isolate=True))
    with caplog.at_level(logging.INFO, "ejkernel_eqx"):
        assert tune_problem(toy.problem(), triton, options=QUICK).config == toy.ToyConfig(2)
    assert "is tuned in this process, which a crash of a candidate would end" in caplog.text


def test_what_is_defined_in_a_script_cannot_be_tuned_elsewhere(children, monkeypatch):
    class Local(toy.Planted):
        pass

    local = dataclasses.replace(toy.PLANTED, target=Local)
    options = dataclasses.replace(QUICK, isolate=True)
    with pytest.raises(TuningError, match=r"cannot be tuned in another process.*Local"):
        tune_problem(toy.problem(), local, options=options)
    monkeypatch.setattr(toy.Planted, "__module__", "__main__")
    with pytest.raises(TuningError, match=r"Planted is defined in __main__"):
        tune_problem(toy.problem(), toy.PLANTED, options=options)
    assert not children[1]  # no process was started


def test_in_this_process_a_spoilt_device_ends_the_search(monkeypatch):
    monkeypatch.setattr(parts.trials, "device_works", lambda: False)
    monkeypatch.setattr(toy, "_drifting", lambda x: 1 / 0)
    options = dataclasses.replace(QUICK, isolate=False)
    with pytest.raises(TuningError, match=r"left the device unusable.*fault drifts(.|\n)*isolate=True"):
        tune_problem(toy.problem(faults="drifts"), toy.PLANTED, options=options)
