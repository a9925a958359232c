"""Pages made when the site is built: notebooks as they are stored, with their outputs, and the version in the footer."""

import json
import pathlib
import tomllib

from mkdocs.structure.files import File, Files


def on_config(config):
    project = pathlib.Path(config.config_file_path).with_name("pyproject.toml")
    version = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"ejkernel_eqx {version} · Apache License 2.0"
    return config


def on_files(files: Files, config) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = _markdown(json.loads(file.content_string), file.name + ".ipynb")
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files


def _markdown(notebook: dict, name: str) -> str:
    heading, *cells = notebook["cells"]
    parts = ["".join(heading["source"]), f"*[Download this page as a notebook]({name}).*"]
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(output: dict) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![The picture that this cell draws](data:image/png;base64,{data['image/png'].strip()})"
    return _fenced("text", "".join(output.get("text") or data["text/plain"]))


def _fenced(language: str, text: str) -> str:
    fence = "```" if "```" not in text else "````"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
