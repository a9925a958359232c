"""Every Python block of the README and of the pages runs as it stands, one behind the other, with nothing given to it."""

import pathlib
import re
import sys

import jax
import jaxtyping
import pytest

import ejkernel_eqx as ejx

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if BLOCK.search(path.read_text(encoding="utf-8"))
]


def test_pages_are_found():
    assert {"README.md", "docs/index.md", "docs/guides/recurrence.md"} <= set(PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_snippets(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a copy of the repository
    loaded = set(sys.modules)
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    text = (ROOT / page).read_text(encoding="utf-8")
    if "symbolic_shape" in text:  # a symbol is no `int`, as sizes are annotated everywhere
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    # Blank lines for what stands between the blocks: an error names the line of the page.
    program, end = [], 0
    for block in BLOCK.finditer(text):
        program.append("\n" * text.count("\n", end, block.start(1)) + block[1])
        end = block.end(1)
    # A reader's settings, and less effort for each tuning than a reader's.
    options = ejx.tuning_options(max_candidates=2, time_budget=5, samples=1)
    with options, jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile("".join(program), page, "exec"), {"__name__": "guide"})
    for name in {path.stem for path in (ROOT / "examples").glob("*.py")} - loaded:
        sys.modules.pop(name, None)
