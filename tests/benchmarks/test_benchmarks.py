"""The benchmarks run, check before they time, and write what they say."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, attention_problems, measure, report, tune, tune_problems
from ejkernel_eqx.dispatch import Backend, device_facts, DeviceFacts, kernel_registry
from ejkernel_eqx.dispatch.cache_file import parse as parse_table
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.dispatch.persistent import CACHE_DIR

_QUICK = ("--quick", "--samples", "3", "--sample-ms", "0.5", "--no-torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run over the plain and the windowed problem, and the folder with its files."""
    folder = tmp_path_factory.mktemp("attention")
    paths = [f"--{name}={folder / name}" for name in ("json", "plot", "markdown")]
    # `jax.nn` promotes dtypes as it likes: the rule of this suite is for our own code.
    with jax.numpy_dtype_promotion("standard"):
        assert attention.main([*_QUICK, "--problems", "H2 D16 causal (float32|window)", *paths]) == 0
    return json.loads((folder / "json").read_text()), folder


@pytest.mark.slow
def test_every_result_is_checked_and_timed(run):
    content, _ = run
    rows = content["rows"]
    assert {row["problem"] for row in rows} == {
        "B2 S128 H2 D16 causal float32",
        "B2 S128 H2 D16 causal window 32 float32",
    }
    assert {row["direction"] for row in rows} == set(attention.DIRECTIONS)
    for row in rows:
        assert row["reason"] is None
        assert set(row["errors"]) == ({"out"} if row["direction"] == "forward" else set("qkv"))
        assert all(0 < error <= row["bound"] for error in row["errors"].values())
        assert row["ms"] > 0 and len(row["samples_ms"]) == 3 and row["spread"] >= 0 and row["tflops"] > 0
        assert math.isfinite(row["ratio"]) and row["ratio"] > 0
    default = next(row for row in rows if row["implementation"] == "default")
    assert default["platform"] == "xla" and "block_q" in default["config"]


@pytest.mark.slow
def test_options_are_compared_with_plain_attention(run):
    content, _ = run
    features = {f["direction"]: f for f in content["features"]}
    assert set(features) == set(attention.DIRECTIONS)
    for feature in features.values():
        # 32 * 33 / 2 + 96 * 32 visible scores of 128 * 129 / 2, in one tile of 128 x 128.
        assert feature["visible_scores"] == pytest.approx((32 * 33 / 2 + 96 * 32) / (128 * 129 / 2))
        assert feature["visible_tiles"] == 1
        assert feature["per_score"] == pytest.approx(feature["time"] / feature["visible_scores"])
    assert all(math.isfinite(entry["value"]) for entry in content["summary"].values())


@pytest.mark.slow
def test_the_report_names_its_origin(run):
    content, folder = run
    environment = content["environment"]
    assert environment["device"] == jax.devices()[0].device_kind
    assert environment["versions"]["jax"] == jax.__version__ and environment["versions"]["ejkernel-eqx"]
    assert "date" in environment and "commit" in environment
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")
    assert "| B2 S128 H2 D16 causal float32 |" in (folder / "markdown").read_text()


def test_a_wrong_result_gets_no_time(monkeypatch):
    true = attention.jax_nn

    def wrong(implementation):
        def prepare(problem, sets, backward):
            prepared = true(implementation)(problem, sets, backward)
            return prepared._replace(results={name: 1.02 * x for name, x in prepared.results.items()})

        return prepare

    monkeypatch.setattr(attention, "jax_nn", wrong)
    options = attention.parse([*_QUICK, "--platforms", "default"])
    with jax.numpy_dtype_promotion("standard"):
        rows = next(attention.measure(attention_problems.TINY[0], options))
    peer, default = rows
    assert peer.reason is not None and peer.reason.startswith("wrong") and peer.ms is None
    assert default.reason is None and default.ms is not None and default.ratio is None


def test_no_platform_and_no_problem(capsys):
    with pytest.raises(SystemExit):
        attention.parse(["--platforms", "cudnn"])
    assert attention.main(["--quick", "--problems", "nothing"]) == 2
    assert "no problem matches 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "problem", [*attention_problems.TINY, *attention_problems.FEATURES], ids=lambda p: p.name
)
def test_the_visible_scores_are_counted(problem):
    small = attention_problems.AttentionProblem(
        1,
        512,
        1,
        16,
        window=problem.window and 100,
        packed=problem.packed,
        document=128,
        causal=problem.causal,
    )
    i, j = np.arange(512)[:, None], np.arange(512)
    seen = np.ones((512, 512), bool)
    if small.causal:
        seen &= j <= i
    if small.window:
        seen &= j > i - 100
    if small.packed:
        seen &= i // 128 == j // 128
    assert small.visible_scores() == seen.sum()
    assert small.visible_tiles(64) == seen.reshape(8, 64, 8, 64).any((1, 3)).sum()


def test_names_are_unique():
    every = (*attention_problems.ANCHORS, *attention_problems.FEATURES, *attention_problems.GRID)
    names = [problem.name for problem in every]
    assert len(set(names)) == len(names) == 30
    assert all(baseline in names for problem in every for baseline in problem.baselines)
    # The same number of tokens and of heads times their size: a constant amount of memory.
    assert {p.B * p.S for p in attention_problems.GRID} == {16384}
    assert {p.H * p.D for p in attention_problems.GRID} == {2048}


def test_documents_touch_the_tiles_of_short_rows():
    packed = next(p for p in attention_problems.FEATURES if p.packed)
    short = next(p for p in attention_problems.ANCHORS if p.name == packed.baselines[-1])
    assert (
        packed.visible_tiles() == short.visible_tiles() and packed.visible_scores() == short.visible_scores()
    )


class _Slow:
    """Takes `ms` for each launch, and a fixed time for each sample."""

    def __init__(self, ms: float):
        self.ms, self.launched = ms, []

    def sample(self, launches: int) -> float:
        self.launched.append(launches)
        return (self.ms * launches + 0.01) / 1e3


def test_samples_are_long_enough_and_taken_in_turn():
    works = {"fast": _Slow(0.1), "slow": _Slow(50.0)}
    timings = measure.time_in_turn(works, samples=5, sample_ms=30)
    assert timings["fast"].launches == 300 and timings["slow"].launches == 1
    assert timings["fast"].ms == pytest.approx(0.1, rel=1e-3) and len(timings["fast"].samples) == 5
    assert works["fast"].launched[-5:] == [300] * 5


def test_input_sets_are_rotated():
    seen = []
    work = measure.JaxWork(lambda x: seen.append(int(x[0])) or x, [(jnp.full(1, n),) for n in range(3)])
    work.sample(7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.slow
def test_problems_are_tuned_once(monkeypatch, tmp_path, capsys):
    """The winner is in the table for every operation that runs the same kernels; a second run finds it there."""
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    # Long enough for two ways to cut it.
    monkeypatch.setattr(
        attention_problems, "TINY", (attention_problems.AttentionProblem(1, 256, 1, 16, dtype="float32"),)
    )
    table, written = tmp_path / "attention.json", tmp_path / "report.json"
    arguments = ["--quick", "--platform", "xla", "--output", str(table), "--json", str(written)]
    arguments += ["--candidates", "2", "--samples", "2", "--sample-ms", "0.5", "--commit", "abc"]
    assert tune.main(arguments) == 0
    content = parse_table(table.read_text(), "table")
    assert content.header["device"]["kind"] == device_facts().kind and content.header["commit"] == "abc"
    (row,) = json.loads(written.read_text())["rows"]
    assert [r.operation for r in content.records] == [
        "block_sparse_attention",
        "flash_attention",
        "ring_attention",
        "scaled_dot_product_attention",
    ]
    assert content.records[1].problem == row["key"]
    assert all(r.config == row["tuned"] and set(r.errors) == {"out", "q", "k", "v"} for r in content.records)
    assert row["candidates"]["denied"] == 0 and row["candidates"]["timed"] >= 2
    for direction, ratio in row["ratio"].items():
        assert ratio == pytest.approx(row["heuristic_ms"][direction] / row["ms"][direction])
    assert "[0 s, 1/1] B1 S256" in capsys.readouterr().out

    stamp = table.stat().st_mtime_ns
    assert tune.main(arguments) == 0
    said = capsys.readouterr().out
    assert "[0 s" not in said and "within 1.10x" in said and table.stat().st_mtime_ns == stamp


def test_the_table_keeps_other_problems(tmp_path):
    implementation = kernel_registry.get("flash_attention", "xla")
    first, second = (
        tune_problems.attention_problem(attention_problems.AttentionProblem(1, size, 1, 16), implementation)
        for size in (64, 128)
    )
    environment = report.environment("abc")
    record = tune.Record(
        "flash_attention", "xla", 1, first.key(), first.to_dict(), tune.software(), None, date="2026-01-01"
    )
    table = tune.Table(tmp_path / "table.json")
    table.add(tune.twins(record, implementation, tune_problems.FAMILIES["attention"]), environment)
    other = tune.dataclasses.replace(record, problem=second.key(), exact=second.to_dict())
    tune.Table(table.path).add([other], environment)
    old = tune.dataclasses.replace(other, software={"jaxlib": "0"}, date="2026-01-02")
    tune.Table(table.path).add([old], environment)
    read = tune.Table(table.path)
    assert len(read.records) == 5 and read.knows(first, implementation)
    assert not read.knows(second, implementation)  # with other software than this


@pytest.mark.slow
def test_a_table_of_another_family(monkeypatch, tmp_path):
    """Lightning attention's winner serves linear attention with a constant decay too, and no other member."""
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    table = tmp_path / "recurrence.json"
    arguments = ["--family", "recurrence", "--quick", "--platform", "xla", "--output", str(table)]
    arguments += ["--candidates", "2", "--samples", "2", "--sample-ms", "0.5", "--commit", "abc"]
    assert tune.main(arguments) == 0
    records = parse_table(table.read_text(), "table").records
    assert {r.operation for r in records} == {"lightning_attention", "linear_attention"}
    assert all(r.config and set(r.errors) == {"out", "final_state", "q", "k", "v", "g"} for r in records)


@pytest.mark.parametrize("family", sorted(tune_problems.FAMILIES.keys() - {"attention"}))
def test_every_problem_of_a_family_has_kernels(family):
    """No two have one name, and each has candidates on the GPU that tables are shipped for."""
    pytest.importorskip("triton")
    device = DeviceFacts(
        Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")
    )
    problems = tune_problems.FAMILIES[family].problems() + tune_problems.FAMILIES[family].tiny()
    assert len({problem.name for problem in problems}) == len(problems)
    for problem in problems:
        implementation = kernel_registry.get(problem.operation, "triton")
        asked = problem.make(kernel_registry.get(problem.operation, "xla"))
        assert implementation.load().unsupported(asked, device) is None, problem.name
        candidates = implementation.load().candidates(asked, device)
        assert candidates[0] == implementation.load().default_config(asked, device), problem.name


def test_nothing_is_tuned_where_the_platform_cannot_run(capsys):
    if device_facts().vendor == "nvidia":
        pytest.skip("it runs here")
    assert tune.main(["--quick", "--platform", "triton"]) == 2
    assert "triton needs a GPU" in capsys.readouterr().err


def test_how_far_the_heuristics_are():
    rows = [
        {"problem": name, "ratio": ratio}
        for name, ratio in (("a", {"x": 1.0, "y": 1.05}), ("b", {"x": 1.3}), ("c", {}))
    ]
    assert tune.summary(rows) == {
        "bar": 1.1,
        "problems": 2,
        "within": 1,
        "worst": {"problem": "b", "ratio": 1.3},
    }


def test_markdown_goes_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    for text in ("new", "newer"):
        report.write_markdown(page, "a", text)
    assert page.read_text() == "before\n<!-- a: begin -->\nnewer\n<!-- a: end -->\nafter\n"


def test_json_refuses_what_is_no_number(tmp_path):
    with pytest.raises(ValueError):
        report.write_json(tmp_path / "x", {"value": float("nan")})
    assert not (tmp_path / "x").exists()
