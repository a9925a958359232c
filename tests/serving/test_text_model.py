"""Strings to strings: the texts of a folder's model, and the commands `generate` and `chat`."""

import io
import json

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.cli.main import main

for name in ("tokenizers", "jinja2"):
    pytest.importorskip(name, reason="needs the extra text")

from ejkernel_eqx.serving.text import TextModel  # noqa: E402

from .byte_tokenizer import llama_folder  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return llama_folder(tmp_path, "{{ messages[-1].content }}")


def test_strings_are_continued(folder, capsys, monkeypatch):
    model = TextModel.from_folder(folder, dtype="float32")
    prompts = ["!!!", "#%"]
    tokens = [model.tokenizer.encode(text) for text in prompts]
    expected = [
        model.tokenizer.decode(row)
        for row in ejx.models.generate(model.model, tokens, max_new_tokens=6).texts()
    ]
    assert model.generate(prompts, max_new_tokens=6) == expected and all(expected)
    assert "".join(model.stream("#%", max_new_tokens=6)) == expected[1]
    assert "".join(model.chat([{"role": "user", "content": "#%"}], max_new_tokens=6)) == expected[1]
    with pytest.raises(ValueError, match="texts: expected a list of strings"):
        model.generate("!!!")
    options = ["--dtype", "float32", "--max-new-tokens", "6"]
    assert main(["generate", str(folder), *prompts, *options]) == 0
    assert capsys.readouterr().out == "\n".join(expected) + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("!!!\n\n#%\n/quit\n!!!\n"))
    assert main(["chat", str(folder), *options]) == 0
    assert capsys.readouterr().out == "\n".join([*expected, "bye"]) + "\n"


@pytest.mark.slow
def test_a_chat_has_a_history(folder, capsys, monkeypatch):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("!!\n##\n/new\n%%\n"))
    options = ["--dtype", "float32", "--max-new-tokens", "4", "--system", "&&", "--json"]
    assert main(["chat", str(folder), *options]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    model = TextModel.from_folder(folder, dtype="float32")
    assert messages[-1]["content"] == model.generate(["&&%%"], max_new_tokens=4)[0]


def test_ctrl_c_stops_the_answer_alone(folder, capsys, monkeypatch):
    def chat(self, messages, **options):
        yield "one"
        if len(messages) == 1:
            raise KeyboardInterrupt
        yield "two"

    monkeypatch.setattr(TextModel, "chat", chat)
    monkeypatch.setattr("sys.stdin", io.StringIO("!\n!\n"))
    assert main(["chat", str(folder)]) == 0
    assert capsys.readouterr().out == "one\nonetwo\nbye\n"


def test_what_is_wrong_is_said(folder, capsys):
    def error(*options):
        assert main(list(map(str, options))) == 2
        return capsys.readouterr().err

    assert "temperature: expected a number" in error("chat", folder, "--temperature", -1)
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template; use the command generate" in error("chat", folder)
    assert "config.json' is not there. Give the folder of a published model" in error(
        "generate", folder / "none", "!"
    )
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json' is not there; copy that of the model" in error("generate", folder, "!")
