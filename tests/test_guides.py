"""Pages whose snippets run as they stand, one behind the other. Those of paged attention and of recurrences have tests beside their families."""

import pathlib
import re

import jax
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["guides/attention", "guides/sequences", "guides/recurrent-layers"])
def test_snippets(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    path = DOCS / f"{page}.md"
    program = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
    with jax.numpy_rank_promotion("allow"):  # a reader's code may broadcast
        exec(compile(program, path.name, "exec"), {"__name__": "guide"})
