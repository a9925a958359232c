"""The guide's program does what its text says of it."""

import pathlib
import re

import jax
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_guide(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides" / "weights.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    names = {"__name__": "guide"}
    with jax.numpy_rank_promotion("allow"):
        exec(compile(program, "weights.md", "exec"), names)
    assert "nothing takes its 'model.layers.1.self_attn.k_norm.weight'" in capsys.readouterr().out
    filled: object = names["filled"]
    assert {str(x.dtype) for x in jax.tree.leaves(filled) if hasattr(x, "dtype")} == {"bfloat16"}
