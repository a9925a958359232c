"""The benchmark of the linear-time family runs, checks before it times, and writes what it says."""

import dataclasses
import functools
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import linear, measure, prepare
from benchmarks.linear import PROBLEMS
from ejkernel_eqx.tuning import measure as tuning_measure


@pytest.mark.few(2)
@pytest.mark.parametrize("problem", PROBLEMS["tiny"], ids=lambda p: p.name)
def test_every_member_is_what_its_recurrence_says(problem):
    """Our operation, called as the benchmark calls it, forward only: that its arguments mean the same."""
    inputs = linear.make_inputs(problem)
    state = [] if inputs.state is None else [inputs.state]
    out, state = jax.jit(linear.ours(problem, "xla"))(inputs.learned, *state)
    if problem.is_step:
        expected = linear.expected_results(problem, inputs)
    else:
        first, last = linear.plain(problem)(inputs.learned)
        expected = {"out": first, "state": last}
    _, wrong = _errors(problem, {"out": out, "state": state}, expected)
    assert wrong is None


def _errors(problem, results, expected):
    row = prepare.Row(problem.name, "forward", "default")
    return linear.FAMILY.errors(problem, row, results, expected)


@pytest.mark.parametrize("member", ["lightning", "SSD", "selective scan"])
def test_peers_are_given_their_own_names(member, monkeypatch):
    """Stand-ins of packages whose functions return one result, or several."""
    calls: list[dict[str, Any]] = []

    def function(**given):
        calls.append(given)
        return ("out", "state") if member == "lightning" else "out"

    for peer in linear.PEERS[member]:
        module, name = peer.run.args[0].rsplit(".", 1)  # pyright: ignore[reportFunctionMemberAccess]
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)
        problem = next(p for p in PROBLEMS["tiny"] if p.member == member and not p.is_step)
        learned = jax.eval_shape(lambda problem=problem: linear.make_inputs(problem, 0)).learned
        assert peer.run(dict.fromkeys(learned, 1.0)) == "out"
    names = {
        "lightning": [{"q", "k", "v", "layer_idx", "num_layers"}],
        "SSD": [{*"xABCD", "dt", "dt_bias", "chunk_size", "dt_softplus"}] * 2,
        "selective scan": [{*"uABCDz", "delta", "delta_bias", "delta_softplus"}],
    }
    assert [set(given) for given in calls] == names[member]


def test_members_have_peers_and_steps_are_large():
    assert {p.member for p in PROBLEMS["anchors"]} == set(linear.MEMBERS)
    # The package's form of a delta product has the writes of a token as tokens.
    assert set(linear.MEMBERS) - set(linear.PEERS) == {"delta product"} and set(linear.PEERS) <= set(
        linear.MEMBERS
    )
    for problem in PROBLEMS["steps"]:
        assert problem.B >= 64 and 4 * math.prod(linear.state_shape(problem)) >= 64 * 2**20


def test_blocks_change_nothing():
    problem = PROBLEMS["tiny"][3]
    member, inputs = linear.MEMBERS[problem.member], linear.make_inputs(problem)
    start = jnp.ones(linear.state_shape(problem))
    whole, blocks = (member.plain(inputs.learned, start, block) for block in (0, 16))
    assert all(jnp.array_equal(a, b) for a, b in zip(whole, blocks))


@pytest.mark.few(2)
@pytest.mark.parametrize("problem", PROBLEMS["tiny"][:7], ids=lambda p: p.name)
def test_segments_side_by_side_and_some_heads_are_the_whole(monkeypatch, problem):
    """The reference of long rows."""
    monkeypatch.setattr(linear, "_SEGMENT", 16)
    monkeypatch.setattr(linear, "_PART", 2)
    monkeypatch.setattr(linear, "_MOST_WHOLE", 0)
    problem = dataclasses.replace(problem, T=64)  # one that no other test has traced
    inputs = linear.make_inputs(problem)
    out, state = linear.plain(problem)(inputs.learned)
    expected = linear.expected_results(problem, inputs)
    assert expected["out"].size == out.size // 2
    _, wrong = _errors(problem, {"out": out, "state": state}, expected)
    assert wrong is None


def test_a_state_goes_from_launch_to_launch():
    seen = []

    def step(inputs, state):
        seen.append(int(inputs))
        return state + inputs, None

    work = measure.StateWork(step, jnp.int32(0), [jnp.int32(1), jnp.int32(2)])
    work.sample(3)
    assert seen == [1, 2, 1] and int(work.state) == 4


class _Slow:
    """Takes `ms` for each run."""

    def __init__(self, ms: float):
        self.ms = ms

    def sample(self, launches: int) -> float:
        return self.ms * launches / 1e3


def test_what_is_shorter_than_a_launch_runs_several_times(monkeypatch):
    monkeypatch.setattr(tuning_measure, "runs_needed", lambda ms, floor: 1 if ms > floor * 10 else 4)
    made = []

    def maker(ms: float):  # as the runner gives it
        return functools.cache(lambda runs: made.append((ms, runs)) or _Slow(ms * runs))

    timings = measure.time_whole({"short": maker(0.05), "long": maker(5.0)}, floor=0.04, samples=2)
    assert timings["short"].ms == pytest.approx(0.05) and timings["long"].ms == pytest.approx(5.0)
    short, again = (runs for ms, runs in made if ms == 0.05)
    assert (short, again) == (1, 4) and [runs for ms, runs in made if ms == 5.0] == [1]
