"""The benchmark of latent attention runs, checks before it times, and says how it compares with what is beside it."""

import dataclasses
import json

import jax
import pytest

from benchmarks import latent

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5")


@pytest.mark.slow
def test_every_result_is_checked_and_timed(tmp_path, capsys):
    paths = [f"--{name}={tmp_path / name}" for name in ("json", "markdown")]
    assert latent.main([*_QUICK, "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    counts = [(3 if problem.chunk else 2) * len(problem.directions) for problem in latent.TINY]
    assert len(content["rows"]) == sum(counts)
    for row in content["rows"]:
        assert row["reason"] is None and row["ms"] > 0 and row["tflop_per_s"] > 0
        other, form = (
            row["implementation"] in (latent.FLASH, latent.KERNEL),
            row["implementation"] in latent.FORMS,
        )
        assert (other or form) == (row["of_flash"] is row["over_kernel"] is None)
        assert other == (not row["errors"])
        assert all(error < 1e-4 for error in row["errors"].values())
    assert {"most time over the kernel", "most time over the faster form"} <= set(content["summary"])
    assert "lowest of flash, forward+backward" in content["summary"]
    assert "| decode N2 S40 H2 R24+8 E32 float32 |" in (tmp_path / "markdown").read_text()
    assert latent.main(["--render", str(tmp_path / "json")]) == 0
    assert "over kernel" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_result_gets_no_time(monkeypatch):
    true = latent.differentiated
    wrong = lambda call, direction, inputs: {n: 1.02 * x for n, x in true(call, direction, inputs).items()}
    problem, options = latent.TINY[0], latent.parse(_QUICK)
    expected = latent.expected_training(problem, latent.make_training(problem, 0))
    monkeypatch.setattr(latent, "expected_training", lambda problem, inputs: expected)
    monkeypatch.setattr(latent, "differentiated", wrong)
    mine, _ = next(latent.measure(problem, options))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None


def test_weights_are_no_constants_of_the_program():
    problem = dataclasses.replace(latent.TINY[1], E=256)
    inputs = latent.make_decoding(problem, 0)
    lowered = jax.jit(latent.decoding(problem, "xla")).lower(inputs, latent.pages_of(inputs))
    assert len(lowered.as_text()) < sum(x.nbytes for x in inputs["weights"])
