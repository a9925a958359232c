"""The page of performance and the README's table are those that `docs/performance_page.py` writes from the results."""

import collections
import importlib.util
import json
import pathlib
import re

import pytest

from ejkernel_eqx._operations import CLASSES

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("performance_page", ROOT / "docs/performance_page.py")
assert SPEC is not None and SPEC.loader is not None
PAGE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGE)
FAMILIES = PAGE.DATA["family"]


@pytest.mark.parametrize(
    ("path", "block"), [(PAGE.PAGE, PAGE.page), (PAGE.README, PAGE.readme)], ids=["page", "readme"]
)
def test_as_written(path, block):
    text = path.read_text(encoding="utf-8")
    assert PAGE.marked(text, block()) == text, "run python docs/performance_page.py"


IN_GUIDE = {
    "LinearAttention": "scalar decay B4 T4096 H16 D128",
    "LightningAttention": "lightning B4 T4096 H16 D128",
    "GatedLinearAttention": "GLA B4 T4096 H16 D128",
    "GatedDeltaRule": "gated delta rule B4 T4096 H16 D128",
    "KernelDeltaAttention": "KDA B4 T4096 H16 D128",
    "DeltaProduct": "delta product B4 T4096 H16 D128",
    "DPLRDeltaRule": "DPLR B4 T4096 H16 D128",
    "StateSpaceV1": "selective scan B4 T4096 I2048 N16",
    "StateSpaceV2": "SSD B4 T4096 H64 P64 N128",
}


def test_the_guide_to_recurrences_has_every_member_and_its_times():
    text = (ROOT / "docs/guides/recurrence.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `(\w+)`.* \|([^|]*)\|$", text.partition("\nThe last column")[0], re.MULTILINE)
    )
    rooms = ("recurrence:", "selective_scan:")
    assert rows.keys() == {name.split(":")[1] for name in CLASSES.values() if name.startswith(rooms)}
    for name, cell in rows.items():
        problem = IN_GUIDE.get(name)
        ways = [PAGE.measured("linear_h200", problem, way) for way in PAGE.DIRECTIONS] if problem else []
        ms = [next(ms for kind, ms, _ in rows if kind in PAGE.OURS) for rows in ways]
        assert cell.strip() == " / ".join(map(PAGE.milliseconds, ms)), name


def test_no_result_lies_unread():
    """A file of results is shown by a page, read by a test, or the log says what it is."""
    texts = [
        PAGE.ROOT / "benchmarks/LOG.md",
        ROOT / "docs/performance_page.toml",
        *(ROOT / "docs/guides").glob("*.md"),
    ]
    named = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    results = [path.stem for path in (ROOT / "benchmarks/results").glob("*.json")]
    # `dispatch/test_shipped_rows.py`, `benchmarks/test_tpu_static.py`
    read_by_tests = ("tuned_h200", "tpu_static")
    assert results and not [name for name in results if name not in named and name not in read_by_tests]


def test_every_benchmark_has_a_file_for_each_device():
    """And no more: of each problem ours is there once. A row has the number of its run, if there are several."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        known, ours = json.loads(path.read_text(encoding="utf-8")), collections.Counter()
        if path.stem == "tpu_static":
            continue
        assert re.fullmatch(r"[a-z_]+_(h100|h200|cpu)", path.stem)
        runs = PAGE.runs(path.stem)
        assert len({run["device"] for run in runs}) == 1, path.stem
        used = {row.get("run") for row in known["rows"]}
        assert used == (set(range(len(runs))) if len(runs) > 1 else {None}), path.stem
        for row in known["rows"]:
            name = row.get("implementation", row.get("variant"))
            ours[row.get("problem"), row.get("direction")] += name in PAGE.OURS
        assert max(ours.values()) <= 1, path.stem


def test_sizes_and_pictures():
    text = PAGE.PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert all(0 < len(family["lines"]) <= 10 for family in FAMILIES)
    assert all((ROOT / "docs" / picture).is_file() for picture in re.findall(r"!\[.*?\]\((.*?)\)", text))


def test_no_number_of_ours_is_written_by_hand():
    """Outside of the marked part the page holds no ratio and no time."""
    before, rest = PAGE.PAGE.read_text(encoding="utf-8").split("<!-- performance: begin -->")
    assert not re.search(r"\d\.\d|\d (ms|µs|TB|TFLOP)", before + rest.split("<!-- performance: end -->")[1])


def test_the_fastest_peer_counts():
    """The strongest of the variants, in whichever file; slower is marked."""
    problem = "B4 S4096 H16 D128 causal"
    known = PAGE.times("attention_h200", problem, "forward+backward")
    assert known.peer == "cuDNN (PyTorch)" and known.other_run and known.slower
    assert PAGE.cells(known)[-1].startswith("**0.9") and PAGE.cells(known)[-1].endswith(PAGE.SLOWER)
    near = PAGE.times("decode_h200", "decode N64 S4096 p16 H32 KV8 D128", "forward")
    assert near.peer == "Pallas (JAX)" and not near.other_run and not near.slower
    causal = ("sparse_h200", "causal B2 S8192 H16 D128", "forward")
    assert PAGE.times(*causal).peer == "flex_attention"
    assert PAGE.times(*causal, ["attention_h200"]).peer == "cuDNN (PyTorch)", "known by another name"
