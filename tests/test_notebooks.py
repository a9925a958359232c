"""The notebooks of the documentation run, and print what is stored in them, but for cells that say that theirs varies."""

import json
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def printed(cell) -> str:
    """What a cell prints and returns on standard output."""
    outputs = [out for out in cell.get("outputs", ()) if out.get("name") != "stderr"]
    texts = [out["text"] if "text" in out else out["data"]["text/plain"] for out in outputs]
    return "".join("".join(text) for text in texts).strip()


def varies(cell) -> bool:
    return "varies" in cell["metadata"].get("tags", ())


def test_each_subject_has_one():
    assert [path.stem for path in NOTEBOOKS] == ["attention", "recurrences", "serving", "tuning"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(printed(cell) and not varies(cell) for cell in cells)
        assert re.match(r"# \S", "".join(cells[0]["source"])), "a notebook begins with its title alone"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, compiled as for a reader
    stored = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3").execute()
    for number, (old, new) in enumerate(zip(stored.cells, run.cells, strict=True)):
        if old.cell_type == "code" and not varies(old):
            assert printed(old) == printed(new), f"cell {number}: run the notebook again and store it"
