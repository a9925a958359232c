"""Links of the README lead somewhere, and what the documents call by name is there."""

import functools
import pathlib
import re

import pytest

import ejkernel_eqx as ejx

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_exist(page):
    names = re.findall(r"\bejx\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", page.read_text(encoding="utf-8"))
    for name in names:
        assert functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), ejx), name
