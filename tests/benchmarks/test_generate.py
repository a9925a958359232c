"""The benchmark of whole models that decode: its times are those of a step, and its problems are of models that can be built."""

import json

import pytest

import ejkernel_eqx as ejx
from benchmarks import generate, problems


@pytest.mark.slow
def test_steps_of_a_tiny_model_are_timed(tmp_path):
    path = tmp_path / "generate.json"
    assert generate.main(["--quick", "--commit", "abc", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["problem"] == "tiny-b2-s16" and row["reason"] is None and row["floor_ms"] > 0
    assert row["own_loop_ms"] > 0 and row["own_jit_ms"] > 0 and row["prefill_ms"] > 0 and row["first_call_s"] > 0


def test_a_step_is_the_difference_of_two_calls(monkeypatch):
    (problem,) = generate.PROBLEMS["tiny"]
    calls = []
    monkeypatch.setattr(generate, "least_ms", lambda call, repeats: call() or 7.0 + 3.0 * calls[-1])
    assert generate.step_ms(calls.append, problem, repeats=3, warm=2) == 3.0
    assert calls == [problem.few] * 3 + [problem.many] * 3


def test_problems_are_of_known_models():
    for problem in (p for every in generate.PROBLEMS.values() for p in every):
        config = ejx.models.decoder_config(problems.model_config(problem.model))
        assert config.vocab_size == problems.model_config(problem.model)["vocab_size"], problem.name
    assert [p.name for p in generate.PROBLEMS["anchors"]][3:5] == ["qwen3-0.6b-b1-s32512", "llama-8b-b1"]
