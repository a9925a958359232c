"""The page for those who come from ejKernel: every call it shows has the parameters it shows, in their order and with their defaults.

Our side always; the other side where the package is installed, by reading its source. It need not be importable.
"""

import ast
import functools
import importlib.util
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


# The other side


def source_root() -> pathlib.Path:
    spec = importlib.util.find_spec("ejkernel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("ejkernel is not installed")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def their_functions() -> dict[str, ast.arguments]:
    """The public functions of its operations, by name."""
    root = source_root()
    exported = (root / "modules" / "__init__.py").read_text(encoding="utf-8")
    found = {}
    for path in sorted((root / "modules" / "operations").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and f'"{node.name}"' in exported:
                found[node.name] = node.args
    return found


@functools.cache
def their_names() -> frozenset[str]:
    """Every name that its source defines, takes as a parameter or reads as an attribute, and every string without spaces."""
    names = set()
    for path in source_root().rglob("*.py"):
        names |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(names)


def shown_signatures() -> list[tuple[str, str]]:
    """Name and parameters of every signature of theirs that a row of an operation starts with."""
    found = [piece for row in OURS for piece in pieces(row.cells[0])]
    return [(m[1], m[2]) for piece in found if (m := re.fullmatch(r"(\w+)\((.*)\)", piece))]


def test_signatures_are_shown():
    assert len(shown_signatures()) >= 20
    names = [name for name, _ in shown_signatures()]
    assert {"gated_delta_rule", "recurrent_attention", "ragged_page_attention_v3"} <= set(names)


def described(arguments: ast.arguments) -> tuple[list[tuple[str, str | None]], dict[str, str | None]]:
    """Names and defaults: of what may be given by position, in order, and of keywords."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    text = lambda node: None if node is None else ast.unparse(node)
    pairs = [(a.arg, text(d)) for a, d in zip(positional, defaults, strict=True)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return pairs, {a.arg: text(default) for a, default in keywords}


def agrees(parameters: str, actual: ast.arguments) -> bool:
    """Whether a function takes what is shown of it; after `...` there may be more."""
    is_whole = not parameters.endswith("...")
    text = re.sub(r"(, \*)?,? ?\.\.\.$", "", parameters)
    shown = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(shown, ast.FunctionDef)
    positional, keywords = described(shown.args)
    their_positional, their_keywords = described(actual)
    if is_whole:
        return (positional, keywords) == (their_positional, their_keywords)
    if "*" not in parameters:
        their_positional = their_positional[: len(positional)]
    return positional == their_positional and keywords.items() <= their_keywords.items()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("q, k, *, scale=None", True),
        ("q, k, *, ...", True),
        ("q, ...", True),
        ("q, *, ...", False),
        ("k, q, *, ...", False),
        ("q, k, *, scale=1.0, ...", False),
        ("q, k, *, size=None, ...", False),
    ],
)
def test_signatures_are_compared(parameters, expected):
    function = ast.parse("def f(q, k, /, *, scale=None): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert agrees(parameters, function.args) == expected


def test_their_signatures():
    theirs = their_functions()
    shown = shown_signatures()
    named = {
        word
        for row in OURS
        for word in pieces(row.cells[0])
        if re.fullmatch(r"[a-z_0-9]+", word) and word != "lse"
    }
    assert not ({name for name, _ in shown} | named) - set(theirs)
    assert not [name for name, parameters in shown if not agrees(parameters, theirs[name])]


def test_their_names_exist():
    known = their_names()
    missing = set()
    for row in rows():
        if row.section in (*OPERATIONS, "Where results differ, and why"):
            continue
        for piece in pieces(row.cells[0]):
            names = re.sub(r"=.*?(?=[,)]|$)|\.\.\.|→.*", "=", piece)
            missing |= {
                (row.section, word) for word in re.findall(r"[A-Za-z_]\w+", names) if word not in known
            }
    assert not missing


def test_what_is_not_here_yet_is_there_and_not_here():
    line = next(x for x in PAGE.read_text(encoding="utf-8").split("\n\n") if x.startswith("Not here yet"))
    ours = {name.lower() for name in dir(ejx)}
    for name in re.findall(r"`(\w+)`", line):
        assert name.replace("_", "") not in ours
        if importlib.util.find_spec("ejkernel"):
            assert name in their_functions()
