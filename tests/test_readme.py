"""The README's numbers are those of committed results, and what the documents call by name is there."""

import functools
import json
import pathlib
import re
from typing import Any

import pytest

import ejkernel_eqx as ejx

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")


@functools.cache
def results() -> list[dict[str, Any]]:
    names = ("attention_backward", "linear_peers", "decode")
    files = [ROOT / f"benchmarks/results/{name}_h200_triton_3.7.1.json" for name in names]
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def fastest(problem: str, implementation: str, direction: str) -> str:
    """In milliseconds, with three digits behind the point; of implementations that begin alike the fastest."""
    times = [
        row["ms"]
        for row in results()
        if row["problem"] == problem
        and row["implementation"].startswith(implementation)
        and row.get("direction", "forward") == direction
        and row.get("ms") is not None
    ]
    return f"{min(times):.3f}" if times else ""


def rows() -> list[list[str]]:
    section = README.split("## Performance", 1)[1].split("\n## ", 1)[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} {row[1]}")
def test_times(row):
    problem, ours, forward, backward, peer, peer_forward, peer_backward = row
    problem = problem.removeprefix("attention, ")
    for name, times in ((ours, (forward, backward)), (peer, (peer_forward, peer_backward))):
        measured = tuple(fastest(problem, name, part) for part in ("forward", "forward+backward"))
        assert times == measured
    assert forward and peer_forward


def test_there_are_rows_and_links_lead_somewhere():
    assert len(rows()) >= 8
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_exist(page):
    names = re.findall(r"\bejx\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", page.read_text(encoding="utf-8"))
    for name in names:
        assert functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), ejx), name
