"""What the tables in the package say: no row whose choice its own numbers contradict, and which rows must be measured again."""

import dataclasses
import itertools
import json
import pathlib

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import dispatch, Problem
from ejkernel_eqx.cli.bench import UNSTEADY
from ejkernel_eqx.tuning.search import MARGIN

FOLDER = pathlib.Path(ejx.__file__).parent / "data"
TABLES = {path.relative_to(FOLDER).as_posix(): path for path in sorted(FOLDER.rglob("*.json"))}
TUNED = pathlib.Path(__file__).parents[2] / "benchmarks/results/tuned_h200.json"

MEASURE_AGAIN = {
    "cuda: B4 D128 H16 K16 S4096 T4096 V128 bfloat16 causal top_left window=1023,0",
    "cuda: B6 D128 H16 K16 S1536 T1536 V128 bfloat16 causal top_left window=255,0",
    "triton: B4 D128 H16 K16 S4096 T4096 V128 bfloat16 causal top_left window=1023,0",
    "triton: B8 D128 H16 K16 S2048 T2048 V128 bfloat16 causal top_left window=None,0",
}
"""Rows with times that vary by more than a fifth: the device was busy. Measured again, a row is taken out of here."""


def records(table: str) -> list[dispatch.Record]:
    return list(dispatch.cache_file.parse(TABLES[table].read_text(encoding="utf-8"), table).records)


def contradicted(record: dispatch.Record) -> list[dispatch.Timed]:
    """The candidates that were faster than the record's winner, each by itself and by the tuner's margin."""

    def is_winner(timed: dispatch.Timed) -> bool:
        value = (record.config or {}).get(timed.part) if timed.part else record.config
        return timed.config == (value if isinstance(value, dict) else {timed.part: value})

    limits = {timed.part: timed.ms for timed in record.timed if is_winner(timed)}
    return [timed for timed in record.timed if timed.ms * MARGIN < limits.get(timed.part, 0.0)]


def kernels_of(record: dispatch.Record) -> str:
    """What operations with the same kernels have in common: implementation, version and problem."""
    known = ejx.kernel_registry.of_platform(record.operation, record.platform)
    runs = [(str(i.target), str(i.workload)) for i in known]
    return json.dumps(
        [record.platform, record.version, runs, record.exact | {"operation": ""}], sort_keys=True
    )


@pytest.mark.parametrize("table", TABLES)
def test_no_candidate_is_faster_than_the_winner(table):
    found = {record.problem: contradicted(record) for record in records(table)}
    assert not {problem: faster for problem, faster in found.items() if faster}


def test_a_faster_candidate_would_be_noticed():
    record = records("nvidia_h200/pooling.json")[0]
    parted = {"a": {"block": 1}, "warps": 4}
    slow, fast = dispatch.Timed("a", {"block": 1}, 2.0), dispatch.Timed("a", {"block": 2}, 1.0)
    plain = [
        dispatch.Timed("warps", {"warps": 4}, 2.0),
        dispatch.Timed("warps", {"warps": 8}, 1.99),
    ]  # within the margin
    record = dataclasses.replace(record, config=parted, timed=(slow, fast, *plain))
    assert contradicted(record) == [fast]


@pytest.mark.parametrize("table", TABLES)
def test_operations_with_the_same_kernels_have_the_same_record(table):
    """What one of them was measured with is known for all: none may keep an older, slower winner."""
    same = {}
    for record in records(table):
        same.setdefault(kernels_of(record), []).append(record)
    for one, other in itertools.chain.from_iterable(map(itertools.pairwise, same.values())):
        assert (one.config, one.ms) == (other.config, other.ms), (
            f"{one.operation}, {other.operation}: {one.problem}"
        )


def test_no_heuristic_is_faster_than_what_was_tuned():
    """In the direction that decides, of the runs that the tables come from."""
    for row in json.loads(TUNED.read_text(encoding="utf-8"))["rows"]:
        if ratios := row.get("ratio"):
            assert ratios.get(dispatch.BOTH, ratios[dispatch.FORWARD]) * MARGIN >= 1, row["problem"]


def test_which_rows_were_measured_on_a_busy_device():
    unsteady = set()
    for record in itertools.chain.from_iterable(map(records, TABLES)):
        if max(record.spread.values(), default=0.0) > UNSTEADY:
            problem = str(Problem.from_dict(record.exact)).partition(" ")[2]
            unsteady.add(f"{record.platform}: {problem}")
    assert unsteady == MEASURE_AGAIN
