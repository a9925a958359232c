"""The site: its pages are listed, and a browser finds nothing wrong with them."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests import browser

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(r"^copyright: ejkernel_eqx (\S+) ·", CONFIG, re.MULTILINE)[1] == version


def test_every_page_is_listed():
    """Once, but for the notebooks, which the guides link to."""
    listed = re.findall(r": (\S+\.md)$", CONFIG.split("\nnav:\n")[1], re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    notebooks = {page for page in pages if page.startswith("notebooks/")}
    assert sorted(listed) == sorted(pages - notebooks)
    guides = "".join(path.read_text(encoding="utf-8") for path in (docs / "guides").glob("*.md"))
    assert {page for page in notebooks if f"(../{page})" in guides} == notebooks


@pytest.mark.slow
@pytest.mark.skipif(browser.browser() is None, reason="needs Chrome or Chromium")
@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("playwright", "zensical", "latex2mathml")),
    reason="needs the extra docs",
)
def test_in_a_browser(tmp_path):
    """At 1440 and 412 px, in light and dark."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "docs", tree / "docs")
    shutil.copytree(ROOT / "src", tree / "src")
    shutil.copy(ROOT / "mkdocs.yml", tree)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    subprocess.run(command, cwd=tree, check=True, timeout=300)
    assert len(browser.pages(tree / "site")) > 50
    assert not browser.findings(tree / "site")
