"""Docstrings begin with their subject or a verb."""

import ast
import pathlib
import re

import ejkernel_eqx

SOURCE = pathlib.Path(ejkernel_eqx.__file__).parent
_HEADLESS = re.compile(r"(What|Whether|Of|The same|As|How|Why|Where|When|Which|By|For|From|With|In|On)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_have_a_subject():
    """All but three in a hundred."""
    docstrings = {
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}": text
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node))
    }
    headless = {place: text.splitlines()[0] for place, text in docstrings.items() if _HEADLESS.match(text)}
    assert len(headless) < 0.03 * len(docstrings), "\n".join(f"{k}: {v}" for k, v in sorted(headless.items()))
