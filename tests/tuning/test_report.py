"""`tuning_report`: what the page says."""

import base64
import dataclasses
import re
import struct
import sys

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import TuningResult
from ejkernel_eqx.tuning import Status
from tests.cli.kernels import example_problem, OPERATION, SquareConfig
from tests.tuning import parts
from tests.tuning.parts import data as report_data

PEAKS = parts.Peaks(flops=1e9, bytes=1e9, source="tests")


def tuned(n=64, winner=2):
    """A heuristic, something faster, something wrong, something left out."""
    return TuningResult(
        problem=example_problem(OPERATION, {"N": n}, "float32", {}),
        implementation=ejx.kernel_registry.get(OPERATION, "xla"),
        config=SquareConfig(winner),
        heuristic=SquareConfig(1),
        ms={parts.FORWARD: 0.001, parts.BOTH: 0.004},
        heuristic_ms={parts.FORWARD: 0.0015, parts.BOTH: 0.005},
        measurements=(
            parts.Measurement("", SquareConfig(1), Status.TIMED, ms=0.005, spread=0.01),
            parts.Measurement("", SquareConfig(2), Status.TIMED, ms=0.004, spread=0.02),
            parts.Measurement("", SquareConfig(3), Status.DENIED, "out <is> wrong"),
            parts.Measurement("", SquareConfig(4), Status.SKIPPED, "time budget"),
        ),
        seconds=1.0,
        cached=False,
        errors={"out": 1e-7},
    )


def png_size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_the_page_says_what_was_found(tmp_path):
    path = ejx.tuning_report(tmp_path / "new" / "page.html", [tuned(64), tuned(256, winner=1)])
    page = path.read_text(encoding="utf-8")
    text = re.sub("<[^>]*>", " ", page)
    assert ejx.device_fingerprint() in text and "jaxlib" in text
    rows = [
        " ".join(re.sub("<[^>]*>", " ", row).split()) for row in re.findall("<tr>.*?</tr>", page, re.DOTALL)
    ]
    assert f"{OPERATION} N64 float32 xla forward 0.0015 0.001 1.50x" in rows
    assert f"{OPERATION} N256 float32 xla forward+backward 0.005 0.004 1.25x" in rows
    assert "whole chunks=2 0.005 0.004 1.25x" in rows  # of the first, whose winner is the faster one
    assert "whole chunks=1 0.005 0.005 1.00x" in rows
    assert rows.count("chunks=3 denied out &lt;is&gt; wrong") == 2
    assert rows.count("chunks=4 skipped time budget") == 2
    assert "relative error of the winner: out 1e-07" in text
    # Self-contained: pictures inside, nothing fetched.
    pictures = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert len(pictures) == page.count("<img") == 2 and "http" not in page
    assert min(png_size(base64.b64decode(pictures[0]))) > 200
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_what_was_faster_by_itself_says_why_it_did_not_win(tmp_path):
    """Of a result of this process and of a record; within the margin nothing is to be said."""
    lost = tuned(winner=1)
    close = parts.Measurement("", SquareConfig(5), Status.TIMED, ms=0.00496)
    lost = dataclasses.replace(lost, measurements=(*lost.measurements, close))
    for entry in (
        report_data.entry_of_result(lost),
        report_data.entry_of_record(lost.to_record(parts.device_facts())),
    ):
        reasons = {c.config["chunks"]: c.reason for c in entry.candidates if c.ms is not None}
        assert reasons == {1: "", 2: report_data.LOST, 5: ""}
    page = ejx.tuning_report(tmp_path / "page.html", [lost]).read_text(encoding="utf-8")
    assert page.count(report_data.LOST) == 1 and "3 not timed or passed over" in page


@pytest.mark.slow
def test_the_roofline_needs_peaks(monkeypatch, tmp_path):
    entry = report_data.entry_of_result(tuned())
    assert entry.peaks is None and parts.plot._points(entry) == []
    known = dataclasses.replace(entry, peaks=PEAKS)
    points = {(p.direction, p.name): p for p in parts.plot._points(known)}
    assert set(points) == {(d, name) for d in (parts.FORWARD, parts.BOTH) for name in ("winner", "heuristic")}
    # 64 operations on 512 bytes in a microsecond; 192 in five for the heuristic's forward and backward.
    assert points[parts.FORWARD, "winner"].intensity == pytest.approx(1 / 8)
    assert points[parts.FORWARD, "winner"].speed == pytest.approx(64e6)
    assert points[parts.BOTH, "heuristic"].speed == pytest.approx(192 / 5e-6)
    # 512 bytes at 1e9 bytes a second take 0.512 microseconds.
    monkeypatch.setattr(report_data, "device_peaks", lambda device, dtype: PEAKS)
    page = ejx.tuning_report(tmp_path / "page.html", [tuned()]).read_text(encoding="utf-8")
    assert "<td class=n>51%</td>" in page
    wider = png_size(parts.plot.png([known, dataclasses.replace(known, candidates=())]))
    assert wider[0] >= 800 and wider[1] > png_size(parts.plot.png([known]))[1]


def test_the_users_cache_is_shown_where_nothing_was_tuned_here(tmp_path, monkeypatch):
    monkeypatch.setattr(parts.document, "tuned_results", lambda: ())
    with pytest.raises(ValueError, match="tune first"):
        ejx.tuning_report(tmp_path / "page.html")
    record = tuned().to_record(parts.device_facts())
    parts.user_cache(parts.device_facts(), OPERATION).put(record)
    page = ejx.tuning_report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "out &lt;is&gt; wrong" in page and "0.004" in page and record.date in page
    monkeypatch.setattr(parts.document, "tuned_results", lambda: (tuned(512),))
    page = ejx.tuning_report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "N512" in page and "N64" not in page


def test_a_record_of_an_unknown_operation_is_shown_without_its_heuristic():
    """What was denied as a part of the whole says so."""
    record = dataclasses.replace(
        tuned().to_record(parts.device_facts()),
        operation="tests.nobody",
        config={"forward": {"block": 1}, "warps": 4},
        timed=(
            parts.Timed("forward", {"block": 1}, 2.0),
            parts.Timed("forward", {"block": 2}, 1.0),
            parts.Timed("warps", {"warps": 4}, 2.0),
            parts.Timed("warps", {"warps": 8}, 3.0),
        ),
        denied=(
            parts.Denied("", {"forward": {"block": 2}}, "out is wrong"),
            parts.Denied("warps", {"warps": 2}, "raises"),
        ),
    )
    entry = parts.data.entry_of_record(record)
    assert entry.parts[:2] == ("forward", "warps") and not entry.costs
    assert [c.config for c in entry.candidates if c.is_winner] == [{"block": 1}, {"warps": 4}]
    assert not any(c.is_heuristic for c in entry.candidates)
    reasons = ["denied as a part of the whole: out is wrong", "", "", "", "out is wrong", "raises"]
    assert sorted(c.reason for c in entry.ranked()) == sorted(reasons)
    known = parts.data.entry_of_record(tuned().to_record(parts.device_facts()))
    assert [c.config for c in known.candidates if c.is_heuristic] == [{"chunks": 1}] and known.costs
    assert known.to_heuristic(known.candidates[1]) == pytest.approx(0.8)


def test_one_picture(tmp_path):
    path = ejx.tuning_report(tmp_path / "page.png", [tuned(64), tuned(256)])
    width, height = png_size(path.read_bytes())
    assert width >= 800 and height >= 500
    with pytest.raises(ValueError, match=r"expected \.html for more than 60 problems"):
        ejx.tuning_report(tmp_path / "page.png", [tuned()] * 61)


@pytest.mark.parametrize("name", ["page.pdf", "page"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"path: expected .* in .html or .png, received .*{name}"):
        ejx.tuning_report(tmp_path / name, [tuned()])


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'ejkernel-eqx\[report\]'"):
        ejx.tuning_report(tmp_path / "page.html", [tuned()])
