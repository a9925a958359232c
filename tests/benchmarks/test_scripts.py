"""Every benchmark of a family runs, checks before it times, says what is wrong, and writes what it says."""

import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    attention_problems,
    cells,
    cells_problems,
    decode,
    decode_problems,
    latent,
    linear,
    linear_problems,
    moe,
    moe_layer,
    moe_problems,
    native_sparse,
    pooling,
    pooling_problems,
    sparse,
    sparse_problems,
)

QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5")


class Script(NamedTuple):
    """What a run is expected to write: a row of its page, a line of its summary, its implementations; rows that no error belongs to."""

    module: Any
    problems: str
    page: str
    summary: str
    implementations: set[str]
    unchecked: tuple[str, ...] = ()
    bound: float = 1e-4
    options: tuple[str, ...] = ("--no-torch",)
    has_plot: bool = True


SCRIPTS = {
    "attention": Script(
        attention,
        "H2 D16 causal (float32|window)",
        "| B2 S128 H2 D16 causal float32 |",
        "against B2 S128 H2 D16 causal float32",
        {"default", "jax-xla"},
    ),
    "decode": Script(
        decode,
        "^(decode N2 S40 p4|.* int8|prefill)",
        "| decode N2 S40 p4 H4 KV2 D16 float32 |",
        "lowest ratio, prefill",
        {"default", "gather + jax.nn xla", "float32 pages", "FlashAttention"},
        bound=1e-5,
        options=(),
    ),
    "linear": Script(
        linear,
        "^(SSD|GLA step)",
        "| SSD B2 T48 H2 P8 N8 float32 |",
        "lowest ratio, step",
        {"default", "lax.scan", "in place"},
        ("in place",),
    ),
    "moe": Script(moe, "", "| M24 K8 N16 E3 float32 |", "lowest ratio, d_rhs", {"default", "lax.ragged_dot"}),
    "moe layer": Script(
        moe_layer,
        "",
        "| T12 E8 F16 N4 top 2 float32 |",
        "over matmuls",
        {"default", moe_layer.ALONE},
        (moe_layer.ALONE,),
        has_plot=False,
    ),
    "pooling": Script(
        pooling,
        "^(chunks of|masked)",
        "| masked rows B2 T64 H2 D8 float32 |",
        "lowest ratio, forward",
        {"default", "jax.numpy", pooling.COPY},
        (pooling.COPY,),
        1e-5,
    ),
    "sparse": Script(
        sparse,
        "^(local|map B)",
        "| map B2 S300 H4 KV2 D16 50% float32 |",
        "most time a tile, forward",
        {"default", sparse.DENSE},
        (sparse.DENSE,),
        1e-5,
    ),
    "cells": Script(
        cells,
        "GRU",
        "| GRU B2 T6 H8 I5 float32 |",
        "lowest ratio, forward+backward",
        {"default", "xla", "lax.scan"},
    ),
    "latent": Script(
        latent,
        "",
        "| decode N2 S40 H2 R24+8 E32 float32 |",
        "over kernel",
        set(),
        (latent.FLASH, latent.KERNEL),
        options=(),
        has_plot=False,
    ),
    "native sparse": Script(
        native_sparse,
        "",
        "| decode B2 T48 H4 K2 D16 float32 |",
        "over dense",
        set(),
        (native_sparse.DENSE,),
        options=(),
        has_plot=False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_result_is_checked_and_timed(name, tmp_path, capsys):
    script = SCRIPTS[name]
    paths = [f"--{what}={tmp_path / what}" for what in ("json", "markdown")]
    chosen = ["--problems", script.problems] if script.problems else []
    # `jax.nn` promotes dtypes as it likes: the rule of this suite is for our own code.
    with jax.numpy_dtype_promotion("standard"):
        assert script.module.main([*QUICK, *script.options, *chosen, "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    environment, rows = content["environment"], content["rows"]
    assert environment["device"] == jax.devices()[0].device_kind and environment["commit"] == "abc"
    assert environment["versions"]["jax"] == jax.__version__ and environment["versions"]["ejkernel-eqx"]
    implementations = {row["implementation"] for row in rows}
    assert implementations == script.implementations or not script.implementations, implementations
    for row in rows:
        errors = row["errors"].values() if "errors" in row else [row["error"]]
        assert row["reason"] is None and row["ms"] > 0 and len(row["samples_ms"]) == 2
        assert (row["implementation"] in script.unchecked) != bool(errors)
        assert all(0 <= error < script.bound for error in errors)
        assert row.get("ratio") is None or (math.isfinite(row["ratio"]) and row["ratio"] > 0)
    assert script.page in (tmp_path / "markdown").read_text()
    # The report again, from what is written; some have a plot.
    plot = ["--plot", str(tmp_path / "plot")] if script.has_plot else []
    assert script.module.main(["--render", str(tmp_path / "json"), *plot]) == 0
    assert script.summary in capsys.readouterr().out
    assert not plot or (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_platform_and_no_problem(name, capsys):
    module = SCRIPTS[name].module
    with pytest.raises(SystemExit):
        module.parse(["--platforms", "abacus"])
    assert module.main(["--quick", "--problems", "nothing"]) == 2
    assert "no problem matches 'nothing'" in capsys.readouterr().err


def scaled(x: Any) -> Any:
    return jax.tree.map(lambda x: 1.02 * x, x)


def calls_scaled(make: Any) -> Any:
    return lambda *made: lambda *given: scaled(make(*made)(*given))


# Where a fault is planted, and how: calls that give other results, or other results that are expected.
WRONG = {
    "decode": (decode_problems, "ours", calls_scaled, decode_problems.TINY[0]),
    "linear": (linear_problems, "ours", calls_scaled, linear_problems.TINY[0]),
    "moe": (moe_problems, "ours", calls_scaled, moe_problems.TINY[0]),
    "pooling": (pooling_problems, "ours", calls_scaled, pooling_problems.TINY[0]),
    "sparse": (sparse_problems, "ours", calls_scaled, sparse_problems.TINY[0]),
    "cells": (cells_problems, "ours", calls_scaled, cells_problems.TINY[2]),
    "latent": (latent, "expected_training", None, latent.TINY[0]),
    "moe layer": (moe_layer, "expected_results", None, moe_layer.TINY[1]),
    "native sparse": (native_sparse, "expected_results", None, native_sparse.TINY[1]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("decode", "linear", "moe layer") else pytest.mark.slow)
        for name in WRONG
    ],
)
def test_a_wrong_result_gets_no_time(name, monkeypatch):
    owner, attribute, wrap, problem = WRONG[name]
    true, script = getattr(owner, attribute), SCRIPTS[name]
    rows: list[Any]
    monkeypatch.setattr(owner, attribute, wrap(true) if wrap else lambda *given: scaled(true(*given)))
    platform = [] if name == "decode" else ["--platforms", "xla" if name == "cells" else "default"]
    options = script.module.parse([*QUICK, *script.options, *platform])
    with jax.numpy_dtype_promotion("standard"):
        if name == "decode":
            rows = decode.measure(problem, {"copy": 4.0, "read": 4.0}, options)
        else:
            rows = next(iter(script.module.measure(problem, options)))
    assert rows[0].reason.startswith("wrong: ") and rows[0].ms is None
    others = [row for row in rows[1:] if row.reason is None]
    assert wrap is None or (others and all(row.ms > 0 for row in others))


def test_a_wrong_peer_gets_no_time(monkeypatch):
    true = attention.jax_nn

    def wrong(implementation):
        def prepare(problem, sets, backward):
            prepared = true(implementation)(problem, sets, backward)
            return prepared._replace(results=scaled(prepared.results))

        return prepare

    monkeypatch.setattr(attention, "jax_nn", wrong)
    options = attention.parse([*QUICK, "--no-torch", "--platforms", "default"])
    with jax.numpy_dtype_promotion("standard"):
        peer, default = next(attention.measure(attention_problems.TINY[0], options))
    assert peer.reason is not None and peer.reason.startswith("wrong") and peer.ms is None
    assert default.reason is None and default.ms is not None and default.ratio is None


FORMS = [(module, problem) for module in (pooling_problems, sparse_problems) for problem in module.TINY]


@pytest.mark.few(3)
@pytest.mark.parametrize("module, problem", FORMS, ids=lambda x: getattr(x, "name", ""))
def test_every_form_is_what_its_formula_says(module, problem):
    """Results and gradients of our operation, called as the benchmark calls it."""
    inputs = module.make_inputs(problem)
    expected = module.expected_results(problem, inputs)
    found = jax.jit(module.direction_of(module.ours(problem, "xla"), True))(inputs)
    _, wrong = module.errors_of(problem, found, expected)
    assert wrong is None and all(jnp.any(x != 0) for x in found.values())


@pytest.mark.parametrize(
    "module",
    [attention_problems, cells_problems, decode_problems, linear_problems, moe_problems]
    + [pooling_problems, sparse_problems],
    ids=lambda module: module.__name__,
)
def test_names_of_problems_are_unique(module):
    lists = [getattr(module, name, ()) for name in ("EVERY", "ANCHORS", "FEATURES", "GRID", "STEPS", "CPU")]
    every = {problem for problems in lists for problem in problems}
    assert every and len({problem.name for problem in every}) == len(every)


def test_groups_are_of_their_problem():
    for problem in (*moe_problems.ANCHORS, *moe_problems.CPU, *moe_problems.TINY):
        sizes = moe_problems.group_sizes(problem, np.random.default_rng(0))
        assert sizes.sum() == problem.M and (not problem.skewed or sizes[0] == problem.M // 2)
