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
    assert f"\ncopyright: ejkernel_eqx {version} ·" in CONFIG


def test_every_page_is_listed():
    """Once, but for the notebooks, which the guides link to."""
    listed = re.findall(r": (\S+\.md)$", CONFIG.split("\nnav:\n")[1], re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    notebooks = {page for page in pages if page.startswith("notebooks/")}
    assert sorted(listed) == sorted(pages - notebooks)
    guides = "".join(path.read_text(encoding="utf-8") for path in (docs / "guides").glob("*.md"))
    assert {page for page in notebooks if f"(../{page})" in guides} == notebooks


def test_shared_options_are_shown():
    """Where an operation takes `__init__` from its options, the reference has the arguments."""
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    name = "docs/extensions/shared.py"
    assert f"extensions: [{name}]" in CONFIG
    extensions = griffe.load_extensions(str(ROOT / name))
    package = griffe.load(
        "ejkernel_eqx", search_paths=[ROOT / "src"], allow_inspection=False, extensions=extensions
    )
    for cls in (
        "paged.paged.PagedAttention",
        "recurrence.gated_linear.GatedLinearAttention",
        "nn.cells.LSTM",
    ):
        assert package[cls]["__init__"].docstring.value.startswith("**Arguments:**")


def needs(*modules):
    """Marks for a test that needs a browser and modules of the extra `docs`."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    reason = "needs Chrome or Chromium" if browser.browser() is None else f"needs the extra docs: {missing}"
    return pytest.mark.skipif(browser.browser() is None or bool(missing), reason=reason)


FAULTS = {
    "wider than the screen": "<div style='width: 3000px'>wide</div>",
    "over the edge": "<p style='width: 3000px'>wide</p>",
    "missing picture": "<img src='none.png' alt='none'>",
    "picture without a text": "<img src='none.png'>",
    "404": "<img src='none.png' alt='none'>",
    "broken name": "<h2 style='width: 2em; overflow-wrap: anywhere'>Multiplication</h2>",
    "cut off": "<div style='width: 3em; overflow: hidden; white-space: nowrap'>a long line of text</div>",
    "scrolls without a shade": "<div style='width: 3em; overflow-x: auto; white-space: nowrap'>a long line of text</div>",
    "contrast": "<p style='color: #aaa'>pale</p>",
    "text of 7 px": "<p style='font-size: 7px'>small</p>",
    "from elsewhere": "<script src='http://localhost:9/script.js'></script>",
    "Uncaught": "<script>throw new Error('Uncaught')</script>",
    "10 entries in the sidebar": "<div class='md-sidebar--primary'>"
    + "".join(f"<a class='md-nav__link' href='#'>{n}</a>" for n in range(10))
    + "</div>",
}


@pytest.mark.slow
@needs("playwright")
def test_the_script_sees_faults(tmp_path):
    """Each fault has a page of its own, beside one without."""
    for n, body in enumerate(("<p>sound</p>", *FAULTS.values())):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "index.html").write_text(
            f"<!doctype html><html><body><article>{body}</article></body></html>"
        )
    (tmp_path / "favicon.ico").touch()
    found = browser.findings(tmp_path)
    assert not [line for line in found if line.startswith("0 ")]
    for n, fault in enumerate(FAULTS, 1):
        assert any(line.startswith(f"{n} at") and fault in line for line in found), (fault, found)


@pytest.mark.slow
@needs("playwright", "zensical", "latex2mathml", "mkdocstrings")
def test_in_a_browser(tmp_path):
    """At 1440 and 412 px, in light and dark."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "docs", tree / "docs")
    shutil.copytree(ROOT / "src", tree / "src")
    shutil.copy(ROOT / "mkdocs.yml", tree)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    subprocess.run(command, cwd=tree, check=True, timeout=300)
    assert len(browser.pages(tree / "site")) > 50
    assert browser.findings(tree / "site") == []
