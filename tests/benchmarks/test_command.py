"""What the benchmarks share: a problem or an implementation that fails leaves its reason, and the others are measured."""

import argparse
import json

import jax.numpy as jnp
import pytest

from benchmarks import (
    linear,
    linear_problems,
    prepare,
    tune,
)
from ejkernel_eqx.dispatch.persistent import CACHE_DIR

_QUICK = ["--quick", "--samples", "2", "--sample-ms", "0.5"]


@pytest.mark.slow
def test_inputs_that_do_not_fit_cost_one_problem(monkeypatch, tmp_path, capsys):
    fitting = linear_problems.make_inputs
    failed = next(p for p in linear_problems.TINY if "step" in p.name)

    def make_inputs(problem, seed=0):
        if problem == failed:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory\nand much more")
        return fitting(problem, seed)

    monkeypatch.setattr(linear_problems, "make_inputs", make_inputs)
    path = tmp_path / "out.json"
    assert linear.main([*_QUICK, "--no-torch", "--problems", "step", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    (lost,) = [row for row in rows if row["problem"] == failed.name]
    assert lost["ms"] is None
    assert lost["reason"] == "not measured: MemoryError: RESOURCE_EXHAUSTED: out of memory"
    others = [row for row in rows if row["problem"] != failed.name]
    assert others and all(row["ms"] > 0 for row in others)
    assert f"{failed.name}, " in capsys.readouterr().err
    pictures = [f"--plot={tmp_path / 'out.png'}", f"--markdown={tmp_path / 'out.md'}"]
    assert linear.main(["--render", str(path), *pictures]) == 0


def _row(name: str) -> linear.Row:
    return linear.Row("problem", "forward", name, False)


class _Work:
    """Fails in one of its samples."""

    def __init__(self, fails_at: int):
        self.left = fails_at

    def sample(self, launches: int) -> float:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return 1e-3 * launches


def test_every_failure_is_a_reason():
    """Of preparing, of the check, of the first run, and of the timing of all."""

    def ready(work: _Work) -> prepare.Prepared:
        return prepare.Prepared({"out": jnp.zeros(1)}, lambda runs: work, None, 7)

    def fail() -> prepare.Prepared:
        raise KeyError("x")

    def check(row, results):
        return "all of it" if row.implementation == "wrong" else None

    attempts = [
        prepare.Attempt(_row("raises"), fail, (KeyError,)),
        prepare.Attempt(_row("wrong"), lambda: ready(_Work(0))),
        prepare.Attempt(_row("does not run"), lambda: ready(_Work(1))),
        prepare.Attempt(_row("good"), lambda: ready(_Work(0))),
    ]
    options = argparse.Namespace(samples=2, sample_ms=1.0)
    rows = prepare.measure_rows(attempts, check, options)
    reasons = ["KeyError: 'x'", "wrong: all of it", "RuntimeError: out of memory", None]
    assert [row.reason for row in rows] == reasons and [row.ms is None for row in rows] == [True] * 3 + [
        False
    ]
    assert rows[-1].temporary_bytes == 7
    (row,) = prepare.measure_rows([prepare.Attempt(_row("stops"), lambda: ready(_Work(3)))], check, options)
    assert row.reason == "timing: RuntimeError: out of memory" and row.ms is None
    with pytest.raises(KeyError):  # a mistake of ours is none of its failures
        prepare.measure_rows([prepare.Attempt(_row("raises"), fail)], check, options)


def test_a_problem_that_cannot_be_tuned_has_its_reason(monkeypatch, tmp_path):
    def fail(*given, **named):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "tune_problem", fail)
    written = [f"--{name}={tmp_path / name}.json" for name in ("json", "output")]
    assert tune.main(["--family", "normalization", "--quick", "--platform", "xla", *written]) == 0
    content = json.loads((tmp_path / "json.json").read_text())
    assert content["rows"] == [] and [*content["failed"].values()] == ["RuntimeError: RESOURCE_EXHAUSTED"]
