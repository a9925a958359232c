"""The guide's snippets run as they stand."""

import pathlib
import re

import pytest

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "paged.md"


@pytest.mark.slow
def test_snippets():
    program = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL))
    exec(compile(program, GUIDE.name, "exec"), {"__name__": "guide"})
