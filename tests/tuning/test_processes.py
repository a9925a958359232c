"""Two processes that tune together, over the distributed runtime on this machine's CPU."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import filelock
import jax
import pytest

from ejkernel_eqx import Platform, TuningError
from tests.tuning.parts import Known, processes
from tests.tuning.scaling import problem_of, ScaleConfig, SLOW_VARIABLE

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 60


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def both(tmp_path_factory, worker_id):
    """What each scenario of `two_processes` ended with, in process 0 and in process 1: run once, by whichever of pytest's workers asks first."""
    own = tmp_path_factory.getbasetemp()
    file = (own if worker_id == "master" else own.parent) / "two_processes.json"
    with filelock.FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(_both(tmp_path_factory.mktemp("two_processes"))))
    return json.loads(file.read_text())


def _both(folder):
    port = _free_port()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    files = [folder / f"{rank}.json" for rank in range(2)]

    def one(rank):
        # In each process another configuration is slow: alone, process 0 would choose 2 and process 1 would choose 1.
        return subprocess.run(
            [sys.executable, "-m", "tests.tuning.two_processes", str(port), str(rank), str(files[rank])],
            env=env | {SLOW_VARIABLE: str(1 + rank)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(one, range(2)))
    assert all(process.returncode == 0 for process in processes), "\n".join(p.stderr for p in processes)
    found = [json.loads(file.read_text()) for file in files]
    return {name: [results[name] for results in found] for name in found[0]}


def results(both, scenario):
    assert [result["error"] for result in both[scenario]] == [None, None]
    return [result["result"] for result in both[scenario]]


@pytest.mark.slow
def test_skewed_timers_end_with_one_table(both):
    first, second = results(both, "skewed")
    assert first["chosen"] == second["chosen"] == [[2, "autotune"]]
    assert first["table"] == second["table"] and [block for _, _, block in first["table"]] == [10, 2]
    assert first["entries"] == 1
    # A step of the tuned model over the devices of both: each has doubled twice and passed its part on.
    expected = [4.0 * i for i in range(32)]
    assert first["step"] + second["step"] == expected[-8:] + expected[:-8]


@pytest.mark.slow
def test_the_tables_of_process_0_are_everyones(both):
    first, second = results(both, "replanned")
    assert first["before"] == second["before"] == [[1, "heuristic"]]
    assert first["chosen"] == second["chosen"] == [[2, "memory"]] and first["table"] == second["table"]


@pytest.mark.slow
def test_what_was_recorded_is_tuned_together(both):
    first, second = results(both, "recorded")
    assert first == second and first["chosen"] == [[2, "memory"]]


DIFFER = ["processes 1 differ from process 0"] * 2
FAILURES = {
    "process_0_fails": ["TuningError: the device is on fire", "process 0 failed: TuningError: the device is"],
    "process_1_fails": ["process 1 failed: RuntimeError: a file is", "RuntimeError: a file is missing"],
    "different_problems": DIFFER,
    "different_policies": DIFFER,
    "a_kernel_that_others_do_not_have": DIFFER,
    "what_arrives_is_changed": DIFFER,
}


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "said"), FAILURES.items())
def test_what_fails_in_one_process_is_raised_in_both(both, scenario, said):
    for result, expected in zip(both[scenario], said, strict=True):
        assert expected in result["error"]


@pytest.mark.slow
def test_nobody_waits_for_ever(both):
    first, second = both["process_1_stays_away"]
    assert "process 0 has waited 2 s" in first["error"] and second["error"] is None


class Silent:
    """A store in which nobody sets a key."""

    def blocking_key_value_get(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def key_value_dir_get(self, key):
        return ()


def test_waiting_for_the_others_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(processes, "PATIENCE", 0.05)
    monkeypatch.setattr(processes, "_EVERY", 0.01)
    together = processes.Round("ejx.tune")
    together._store = Silent()
    with pytest.raises(TuningError, match="has waited 0 s for the others"):
        together._get("1/answer")
    assert "ejx.tune: process 0 has waited 0 of 0 s for the others" in caplog.text


def test_tables_survive_being_sent():
    key = problem_of(jax.ShapeDtypeStruct((8,), "float32")).key()
    table = {
        (Platform.XLA, key): Known(ScaleConfig(2), (("forward", 0.5),), "tuned 2026-11-21"),
        (Platform.XLA, key.replace("8", "16")): Known(None, (), "tuned", "every configuration was denied"),
    }
    assert processes.decode(processes.encode(table)) == table
    other = {place: Known(ScaleConfig(3)) for place in table}
    assert processes.digest_of(table) != processes.digest_of(other)


def test_a_runtime_without_a_store_is_named():
    with pytest.raises(TuningError, match=r"key-value store.*jax\.distributed\.initialize"):
        processes._store()
