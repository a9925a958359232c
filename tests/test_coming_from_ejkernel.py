"""The page for those who come from ejKernel: every call of ours that it shows has the parameters it shows, in their order."""

import ast
import functools
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import ejkernel_eqx as ejx

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "coming-from-ejkernel.md"


class Row(NamedTuple):
    """A line of one of the page's tables."""

    section: str
    cells: tuple[str, ...]


def rows() -> list[Row]:
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith("|---"):
            found.append(Row(section, tuple(cell.strip() for cell in line.strip("|").split(" | "))))
    return [row for row in found if not row.cells[0].startswith("ejKernel") and row.cells[0] != "subject"]


def code(text: str) -> str:
    """The code of a cell: a name that links to its page and the call behind it are one piece."""
    return re.sub(r"\[`([^`]*)`\]\([^)]*\)`?", r"`\1", text)


def pieces(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", code(text))


def calls(text: str) -> Iterator[ast.Call]:
    """Every piece of code that is a call; `name=` stands for a keyword of any value."""
    for piece in pieces(text):
        try:
            node = ast.parse(re.sub(r"=(?=\s*[,)])", "=_", piece), mode="eval").body
        except SyntaxError:
            continue
        if isinstance(node, ast.Call):
            yield node


OPERATIONS = ("Attention", "In linear time", "Pooling", "Attention over pages", "Matrix products")
OURS = [row for row in rows() if row.section in OPERATIONS]


def check_call(node: ast.Call, function, name: str) -> None:
    """A call of ours as a page writes it: positional arguments by the names of our parameters, unless they are values."""
    parameters = list(inspect.signature(function).parameters.values())
    parameters = parameters[1:] if parameters[0].name == "self" else parameters
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert len(node.args) <= len(positional), f"{name}: {ast.unparse(node)}"
    for given, expected in zip(node.args, positional):
        assert not isinstance(given, ast.Name) or given.id == expected, f"{name}: {ast.unparse(node)}"
    unknown = {keyword.arg for keyword in node.keywords} - {p.name for p in parameters}
    assert not unknown, f"{name} has no {unknown}"


def resolve(node: ast.expr) -> Any:
    return functools.reduce(getattr, ast.unparse(node).split(".")[1:], ejx)


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.cells[0].strip("`").partition("(")[0])
def test_our_calls(row):
    checked = 0
    for cell in row.cells[1:]:
        for node in calls(cell):
            inner = node.func if isinstance(node.func, ast.Call) else node
            if not ast.unparse(inner.func).startswith("ejx."):
                continue
            made = resolve(inner.func)
            check_call(inner, made, ast.unparse(inner.func))
            if inner is not node:
                check_call(node, made.__call__, ast.unparse(inner.func))
                required = [
                    p.name
                    for p in list(inspect.signature(made.__call__).parameters.values())[1:]
                    if p.default is p.empty and p.kind is not p.KEYWORD_ONLY
                ]
                assert len(node.args) >= len(required), f"{ast.unparse(node)} leaves out some of {required}"
            checked += 1
    assert checked or not row.cells[0].startswith("`") or row.cells[0].startswith("`MaskInfo")


@pytest.mark.parametrize(
    "text", ["ejx.GatedDeltaRule()(q, k, v, beta, g)", "ejx.FlashAttention(dropout_prob=)"]
)
def test_a_wrong_call_is_found(text):
    with pytest.raises(AssertionError):
        test_our_calls(Row("Attention", ("`name`", f"`{text}`")))


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.section == "Arguments"], ids=lambda row: row.cells[0]
)
def test_our_arguments(row):
    """What a row names as a parameter is one, of the constructor or of the call as it says."""
    there, here, where = row.cells
    if where == "–":
        return
    operations = [ejx.FlashAttention, ejx.GatedLinearAttention if "recurrences" in there else ejx.Attention]
    functions = operations if where == "constructor" else [o.__call__ for o in operations]
    known = set().union(*(inspect.signature(function).parameters for function in functions))
    first = pieces(there if here == "the same" else here)
    names = re.findall(r"^(\w+)", "\n".join(first if here == "the same" else first[:1]), re.MULTILINE)
    assert names and set(names) <= known


def test_signatures_are_shown():
    """Of theirs, so that a reader finds the call that is to be replaced."""
    shown = [piece for row in OURS for piece in pieces(row.cells[0])]
    names = [m[1] for piece in shown if (m := re.fullmatch(r"(\w+)\((.*)\)", piece))]
    assert len(names) >= 20 and {"gated_delta_rule", "ragged_page_attention_v3"} <= set(names)


def test_what_is_not_here_yet_is_not_here():
    line = next(x for x in PAGE.read_text(encoding="utf-8").split("\n\n") if x.startswith("Not here yet"))
    ours = {name.lower() for name in dir(ejx)}
    assert not [name for name in re.findall(r"`(\w+)`", line) if name.replace("_", "") in ours]


FRAMEWORK = """Executor overlay_cache policy_override autotune benchmark record_invocation autotune_recorded vmap_with_config
pmap_with_config to_json from_json stable_json device_fingerprint sharding_fingerprint find_labels_in_lowered
extract_labels_from_hlo_text labels_to_configs""".split()


@pytest.mark.parametrize("name", FRAMEWORK)
def test_names_of_the_framework(name):
    assert any(name in cell for row in rows() for cell in row.cells)
    assert hasattr(ejx, name) or name in ("Executor", "sharding_fingerprint")
