"""The benchmarks run, check before they time, and write what they say."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, measure, problems, report, tune
from benchmarks.attention import PROBLEMS
from ejkernel_eqx.dispatch import Backend, device_facts, DeviceFacts, kernel_registry
from ejkernel_eqx.dispatch.cache_file import parse as parse_table
from ejkernel_eqx.dispatch.device import shared_memory_limit
from ejkernel_eqx.dispatch.persistent import CACHE_DIR


@pytest.mark.parametrize("problem", [*PROBLEMS["tiny"], *PROBLEMS["features"]], ids=lambda p: p.name)
def test_the_visible_scores_are_counted(problem):
    small = attention.AttentionProblem(
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


def test_documents_touch_the_tiles_of_short_rows():
    packed = next(p for p in PROBLEMS["features"] if p.packed)
    short = next(p for p in PROBLEMS["anchors"] if p.name == packed.baselines[-1])
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
    monkeypatch.setitem(PROBLEMS, "tiny", [attention.AttentionProblem(1, 256, 1, 16, dtype="float32")])
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
        problems.attention_problem(attention.AttentionProblem(1, size, 1, 16), implementation)
        for size in (64, 128)
    )
    environment = report.environment("abc")
    record = tune.Record(
        "flash_attention", "xla", 1, first.key(), first.to_dict(), tune.software(), None, date="2026-01-01"
    )
    table = tune.Table(tmp_path / "table.json")
    table.add(tune.twins(record, implementation, problems.FAMILIES["attention"]), environment)
    other = tune.dataclasses.replace(record, problem=second.key(), exact=second.to_dict())
    tune.Table(table.path).add([other], environment)
    old = tune.dataclasses.replace(other, software={"jaxlib": "0"}, date="2026-01-02")
    tune.Table(table.path).add([old], environment)
    read = tune.Table(table.path)
    assert len(read.records) == 5 and read.knows(first, implementation)
    assert not read.knows(second, implementation)  # with other software than this


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "operations", "errors"),
    [
        # Lightning attention's winner serves linear attention with a constant decay too, and no other member.
        (
            "recurrence",
            {"lightning_attention", "linear_attention"},
            {"out", "final_state", "q", "k", "v", "g"},
        ),
        (
            "paged",
            {f"{name}_attention" for name in ("paged", "prefill_paged", "ragged_paged", "unified")},
            {"out", "lse"},
        ),
    ],
)
def test_tuned_for_every_operation_that_asks(family, operations, errors, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    table = tmp_path / "table.json"
    arguments = ["--family", family, "--quick", "--platform", "xla", "--output", str(table)]
    arguments += ["--candidates", "2", "--samples", "2", "--sample-ms", "0.5", "--commit", "abc"]
    assert tune.main(arguments) == 0
    records = parse_table(table.read_text(), "table").records
    assert {r.operation for r in records} == operations
    assert all(r.config and set(r.errors) == errors for r in records)


@pytest.mark.parametrize("family", sorted(problems.FAMILIES.keys() - {"attention"}))
def test_every_problem_of_a_family_has_kernels(family):
    """No two have one name, and each has candidates on the GPU that tables are shipped for."""
    pytest.importorskip("triton")
    device = DeviceFacts(
        Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, shared_memory_limit("nvidia", "9.0")
    )
    every = problems.FAMILIES[family].problems() + problems.FAMILIES[family].tiny()
    assert len({problem.name for problem in every}) == len(every)
    for problem in every:
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
