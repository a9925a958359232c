"""The command `serve`: a published model's folder as an application."""

import sys

import pytest

from ejkernel_eqx import serving
from ejkernel_eqx.cli.main import main

for name, extra in {
    "tokenizers": "text",
    "jinja2": "text",
    "starlette": "server",
    "uvicorn": "server",
}.items():
    pytest.importorskip(name, reason=f"needs the extra {extra}")
testclient = pytest.importorskip("starlette.testclient", reason="needs httpx")

from ejkernel_eqx.serving import server  # noqa: E402

from .byte_tokenizer import llama_folder  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return llama_folder(tmp_path, "{{ messages[0].content }}")


SIZES = "--num-pages 16 --page-size 4 --max-batch 2 --step-tokens 8 --dtype float32".split()


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--quantise", "int8", "--dequantise"), marks=pytest.mark.slow)],
    ids=["floats", "quantised"],
)
def test_a_folder_is_served(folder, monkeypatch, capsys, options):
    answers = []

    def run(app, host, port):
        assert (host, port) == ("127.0.0.1", 8123)
        with testclient.TestClient(app) as client:
            answers.append(client.get("/v1/models").json()["data"][0]["id"])
            body = {"messages": [{"role": "user", "content": "!!!"}], "max_tokens": 5}
            answers.append(client.post("/v1/chat/completions", json=body).json()["usage"])

    monkeypatch.setattr(server, "run", run)
    options = [*options, "--num-draft-tokens", "2"]
    assert main(["serve", str(folder), "--port", "8123", "--name", "tiny", *SIZES, *options]) == 0
    assert answers == ["tiny", {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}]
    out, err = capsys.readouterr()
    assert out.startswith("5 tokens in ") and out.rstrip().endswith("drafts accepted")
    assert "tiny at http://127.0.0.1:8123/v1" in err


def test_wrong_folders_and_sizes(folder, tmp_path, capsys):
    def error(*options):
        assert main(["serve", *map(str, options)]) == 2
        return capsys.readouterr().err

    assert "config.json' is not there. Give the folder of a published model" in error(tmp_path / "none")
    assert "step_tokens: expected at least max_batch=2, received 1" in error(
        folder, *SIZES, "--step-tokens", 1
    )
    assert "kind: expected one of int8, fp8" in error(folder, *SIZES, "--quantise", "int2")
    assert "num_draft_tokens: " in error(folder, *SIZES, "--num-draft-tokens", -1)
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "chat_template: it cannot be read" in error(folder)


def test_rooms_of_extras_are_attributes(monkeypatch):
    monkeypatch.delattr(serving, "server", raising=False)
    assert serving.server is server
    with pytest.raises(AttributeError, match="serving' has no attribute 'servers'"):
        _ = serving.servers


def test_without_the_extra(folder, monkeypatch, capsys):
    """The message names what is missing and the extra."""
    for module in [name for name in sys.modules if name.startswith("ejkernel_eqx.serving.")]:
        if module.split(".")[2] in ("text", "server"):
            monkeypatch.delitem(sys.modules, module)
    for name in ("text", "server"):
        monkeypatch.delattr(serving, name, raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["serve", str(folder)]) == 2
    found = capsys.readouterr().err
    assert "ejkernel_eqx.serving.text needs jinja2, which is not installed" in found
    assert "pip install 'ejkernel-eqx[text]'" in found
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # its extra has both
    assert main(["serve", str(folder)]) == 2
    assert "run: pip install 'ejkernel-eqx[server]'" in capsys.readouterr().err
