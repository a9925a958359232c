"""An extension of Python-Markdown: the line `{notebook NAME.ipynb}` becomes that notebook of `docs/notebooks`.

Its outputs are shown as they are stored. Its title is left out, as the page has one.
"""

import json
import pathlib
import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
_LINE = re.compile(r"\{notebook (\w+\.ipynb)\}")


def _markdown(notebook: dict) -> str:
    parts = []
    for cell in notebook["cells"][1:]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def _output(output: dict) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![The picture that this cell draws](data:image/png;base64,{data['image/png'].strip()})"
    return _fenced("text", "".join(output.get("text") or data["text/plain"]))


def _fenced(language: str, text: str) -> str:
    fence = "```" if "```" not in text else "````"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


class _Notebooks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        result = []
        for line in lines:
            if found := _LINE.fullmatch(line):
                notebook = json.loads((_FOLDER / found[1]).read_text(encoding="utf-8"))
                result += _markdown(notebook).split("\n")
            else:
                result.append(line)
        return result


class _Extension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Notebooks(md), "notebooks", 40)  # before fenced code


def makeExtension(**options) -> Extension:
    return _Extension(**options)
