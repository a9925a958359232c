"""Every benchmark of a family runs, checks before it times, says what is wrong, and writes what it says; a problem or an implementation that fails
leaves its reason, and the others are measured."""

import argparse
import copy
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    latent,
    losses,
    moe,
    native_sparse,
    pooling,
    prepare,
    quantised,
    runner,
    sparse,
    tune,
)
from benchmarks.__main__ import FAMILIES, family, main
from ejkernel_eqx.dispatch.persistent import CACHE_DIR

QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


class Run(NamedTuple):
    """What a run is expected to write: a row of its page, a line of its summary, its implementations; rows that no error belongs to."""

    problems: str
    page: str
    summary: str
    implementations: set[str]
    unchecked: tuple[str, ...] = ()
    bound: float = 1e-4


RUNS = {
    "attention": Run(
        "H2 D16 causal (float32|window)",
        "| B2 S128 H2 D16 causal float32 |",
        "against B2 S128 H2 D16 causal float32",
        {"default", "jax-xla"},
    ),
    "decode": Run(
        "^(decode N2 S40 p4|.* int8|prefill)",
        "| decode N2 S40 p4 H4 KV2 D16 float32 |",
        "lowest ratio, prefill",
        {"default", "gather + jax.nn xla", "float32 pages", "FlashAttention"},
        bound=1e-5,
    ),
    "linear": Run(
        "^(SSD|GLA step)",
        "| SSD B2 T48 H2 P8 N8 float32 |",
        "lowest ratio, step",
        {"default", "lax.scan", "in place"},
        ("in place",),
    ),
    "moe": Run("", "| M24 K8 N16 E3 float32 |", "lowest ratio, d_rhs", {"default", "lax.ragged_dot"}),
    "moe-layer": Run(
        "",
        "| T12 E8 F16 N4 top 2 float32 |",
        "over that of its matmuls",
        {"default", moe.ALONE},
        (moe.ALONE,),
    ),
    "quantised": Run(
        "(M2 .*(fp8|int4)|E8|by float8)",
        "| M4 K128 N32 E8 2 of them int4 float32 |",
        "most time over the floor, forward",
        {"default", quantised.FLOATS, quantised.COPY},
        (quantised.COPY,),
        bound=0.05,  # `floats` does not round its rows to float8
    ),
    "pooling": Run(
        "^(chunks of|masked)",
        "| masked rows B2 T64 H2 D8 float32 |",
        "lowest ratio, forward",
        {"default", "jax.numpy", pooling.COPY},
        (pooling.COPY,),
        1e-5,
    ),
    "losses": Run(
        "",
        "| forward KL N48 E8 V50 float32 |",
        "lowest share of the products' speed, forward",
        {"default", losses.PRODUCTS},
        (losses.PRODUCTS,),
        1e-5,
    ),
    "sparse": Run(
        "^(local|map B)",
        "| map B2 S300 H4 KV2 D16 50% float32 |",
        "most time a tile, forward",
        {"default", sparse.DENSE},
        (sparse.DENSE,),
        1e-5,
    ),
    "cells": Run(
        "GRU", "| GRU B2 T6 H8 I5 float32 |", "lowest ratio, forward+backward", {"default", "xla", "lax.scan"}
    ),
    "latent": Run(
        "",
        "| decode N2 S40 H2 R24+8 E32 float32 |",
        "over kernel",
        {"default", latent.FLASH, latent.KERNEL, *latent.FORMS},
        (latent.FLASH, latent.KERNEL),
    ),
    "native-sparse": Run(
        "",
        "| decode B2 T48 H4 K2 D16 float32 |",
        "over dense",
        {"default", native_sparse.DENSE},
        (native_sparse.DENSE,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_result_is_checked_and_timed(name, tmp_path, capsys):
    expected = RUNS[name]
    paths = [f"--{what}={tmp_path / what}" for what in ("json", "markdown")]
    # `jax.nn` promotes dtypes as it likes: the rule of this suite is for our own code.
    with jax.numpy_dtype_promotion("standard"):
        assert main([name, *QUICK, "--problems", expected.problems, "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    environment, rows = content["environment"], content["rows"]
    assert environment["device"] == jax.devices()[0].device_kind and environment["commit"] == "abc"
    assert environment["versions"]["jax"] == jax.__version__ and environment["versions"]["ejkernel-eqx"]
    assert {row["implementation"] for row in rows} == expected.implementations
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0 and len(row["samples_ms"]) == 2
        assert (row["implementation"] in expected.unchecked) != bool(row["errors"])
        assert all(0 <= error < expected.bound for error in row["errors"].values())
        assert row["ratio"] is None or (math.isfinite(row["ratio"]) and row["ratio"] > 0)
    assert expected.page in (tmp_path / "markdown").read_text()
    # The report again, from what is written.
    assert main([name, "--render", str(tmp_path / "json"), "--plot", str(tmp_path / "plot")]) == 0
    assert expected.summary in capsys.readouterr().out
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", FAMILIES)
def test_no_platform_and_no_problem(name, capsys):
    with pytest.raises(SystemExit):
        runner.parse(family(name), ["--platforms", "abacus"])
    assert main([name, "--quick", "--problems", "nothing"]) == 2
    assert "no problem matches 'nothing'" in capsys.readouterr().err


def test_only_commands_that_there_are(capsys):
    assert main(["nothing"]) == 2 and "native-sparse" in capsys.readouterr().err


@pytest.mark.parametrize("name", ("attention", "decode", "linear", "moe", "moe_layer", "cells", "pooling"))
def test_committed_results_are_shown(name, tmp_path, capsys):
    """By what wrote them and by what replaced that."""
    path = tune.report.ROOT / "benchmarks" / "results" / f"{name}_h200.json"
    page = tmp_path / "page.md"
    assert main([name.replace("_", "-"), "--render", str(path), "--markdown", str(page)]) == 0
    row = json.loads(path.read_text())["rows"][0]
    assert row["problem"] in capsys.readouterr().out and f"| {row['problem']} |" in page.read_text()


def scaled(x: Any) -> Any:
    return jax.tree.map(lambda x: 1.02 * x, x)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("decode", "linear", "moe-layer") else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_wrong_result_gets_no_time(name):
    """Of ours; others are timed."""
    known = family(name)
    planted = _planted(known, "ours")
    options = runner.parse(known, [*QUICK, "--platforms", "xla" if name == "cells" else "default"])
    with jax.numpy_dtype_promotion("standard"):
        rows = next(runner.measure(planted, known.lists["tiny"][2 if name == "cells" else 0], options))
    mine = [row for row in rows if row.role == "ours"]
    assert mine and all((row.reason or "").startswith("wrong: ") and row.ms is None for row in mine)
    assert all((row.ms and row.ratio is None) or row.role == "peer" for row in rows if row not in mine)


def _planted(known: runner.Family, role: str) -> Any:
    """The family with wrong results of one role."""
    result: Any = copy.copy(known)
    result.implementations = lambda *given: [
        one._replace(make_ready=_scaled(one.make_ready)) if one.role == role else one
        for one in known.implementations(*given)
    ]
    return result


def _scaled(make_ready):
    def ready(*given):
        prepared = make_ready(*given)
        return prepared._replace(results=scaled(prepared.results))

    return ready


def test_a_wrong_peer_gets_no_time():
    planted = _planted(attention.FAMILY, "peer")
    options = runner.parse(planted, [*QUICK, "--platforms", "default"])
    with jax.numpy_dtype_promotion("standard"):
        peer, default = next(runner.measure(planted, attention.PROBLEMS["tiny"][0], options))
    assert peer.reason is not None and peer.reason.startswith("wrong") and peer.ms is None
    assert default.reason is None and default.ms is not None and default.ratio is None


@pytest.mark.slow
def test_candidates_stand_side_by_side(tmp_path):
    path = tmp_path / "candidates.json"
    arguments = ["linear", *QUICK, "--problems", "^GLA B2", "--candidates", "2", "--json", str(path)]
    assert main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["forward"] * 2 + ["forward+backward"] * 2
    assert rows[0]["config"] != rows[1]["config"] and rows[0]["ratio"] == 1.0
    assert rows[0]["implementation"].startswith("heuristic chunk_size=")
    assert all(row["ms"] > 0 and row["errors"] and row["config_from"] == "overlay" for row in rows)


FORMS = [(module, problem) for module in (pooling, sparse, losses) for problem in module.PROBLEMS["tiny"]]


@pytest.mark.few(3)
@pytest.mark.parametrize("module, problem", FORMS, ids=lambda x: getattr(x, "name", ""))
def test_every_form_is_what_its_formula_says(module, problem):
    """Results and gradients of our operation, called as the benchmark calls it."""
    inputs = module.make_inputs(problem)
    expected = module.expected_results(problem, inputs)
    options = runner.parse(module.FAMILY, ["--platforms", "xla"])
    mine = next(iter(module.FAMILY.implementations(problem, options, "forward+backward")))
    results = mine.make_ready([inputs], "forward+backward").results
    _, wrong = runner.errors_of(problem.dtype, results, expected)
    assert wrong is None and all(jnp.any(x != 0) for x in results.values())


def test_names_of_problems_are_unique():
    for known in map(family, FAMILIES):
        every = {problem for group in (*known.groups, "cpu") for problem in known.lists[group]}
        assert every and len({problem.name for problem in every}) == len(every), known


def test_groups_are_of_their_problem():
    for problem in (p for problems in moe.PROBLEMS.values() for p in problems):
        sizes = moe.group_sizes(problem, np.random.default_rng(0))
        assert sizes.sum() == problem.M and (not problem.skewed or sizes[0] == problem.M // 2)


# Failures


@pytest.mark.slow
def test_inputs_that_do_not_fit_cost_one_problem(tmp_path, capsys):
    known = family("linear")
    failed = next(p for p in known.lists["tiny"] if "step" in p.name)

    planted = copy.copy(known)

    def make_inputs(problem, seed=0):
        if problem == failed:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory\nand much more")
        return known.make_inputs(problem, seed)

    path = tmp_path / "out.json"
    arguments = [*QUICK, "--problems", "step", "--json", str(path)]
    planted.make_inputs = make_inputs
    assert runner.main(planted, arguments) == 1
    rows = json.loads(path.read_text())["rows"]
    (lost,) = [row for row in rows if row["problem"] == failed.name]
    assert lost["ms"] is None
    assert lost["reason"] == "not measured: MemoryError: RESOURCE_EXHAUSTED: out of memory"
    others = [row for row in rows if row["problem"] != failed.name]
    assert others and all(row["ms"] > 0 for row in others)
    assert f"{failed.name}, " in capsys.readouterr().err
    pictures = [f"--plot={tmp_path / 'out.png'}", f"--markdown={tmp_path / 'out.md'}"]
    assert main(["linear", "--render", str(path), *pictures]) == 0


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

    def one(name: str, work: _Work, **more: Any) -> prepare.Implementation:
        ready = prepare.Prepared({"out": jnp.zeros(1)}, lambda runs: work, None, 7)
        return prepare.Implementation(name, lambda sets, direction: ready, **more)

    def fail(sets, direction):
        raise KeyError("x")

    def check(row, results):
        return "all of it" if row.implementation == "wrong" else None

    options = argparse.Namespace(samples=2, sample_ms=1.0)
    measured = lambda *some: prepare.measure_rows(some, "problem", "forward", [], check, options)
    rows = measured(
        prepare.Implementation("raises", fail, failures=(KeyError,)),
        one("wrong", _Work(0)),
        one("does not run", _Work(1)),
        one("good", _Work(0)),
    )
    reasons = ["KeyError: 'x'", "wrong: all of it", "RuntimeError: out of memory", None]
    assert [row.reason for row in rows] == reasons
    assert [row.ms is None for row in rows] == [True, True, True, False] and rows[-1].temporary_bytes == 7
    (row,) = measured(one("stops", _Work(3)))
    assert row.reason == "timing: RuntimeError: out of memory" and row.ms is None
    with pytest.raises(KeyError):  # a mistake of ours is none of its failures
        measured(prepare.Implementation("raises", fail))


def test_a_problem_that_cannot_be_tuned_has_its_reason(monkeypatch, tmp_path):
    def fail(*given, **named):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "tune_problem", fail)
    written = [f"--{name}={tmp_path / name}.json" for name in ("json", "output")]
    assert tune.main(["--family", "normalization", "--quick", "--platform", "xla", *written]) == 0
    content = json.loads((tmp_path / "json.json").read_text())
    assert content["rows"] == [] and [*content["failed"].values()] == ["RuntimeError: RESOURCE_EXHAUSTED"]
