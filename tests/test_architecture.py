"""The table of rooms in `rooms.md` is true: who may import whom is read from every module's imports, and what it names exists."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ejkernel_eqx"
PAGE = (ROOT / "tests" / "rooms.md").read_text(encoding="utf-8")
MODULES = frozenset(path.relative_to(SOURCE).with_suffix("").parts for path in SOURCE.rglob("*.py"))
READMES = sorted(SOURCE.rglob("README.md"))
_NAMES = re.compile(r"`([^`]+)`")


def rooms() -> dict[str, frozenset[str] | None]:
    """The rooms that each room may import; `None` for all."""
    section = PAGE.partition("## Rooms")[2].partition("\n## ")[0]
    found: dict[str, frozenset[str] | None] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and (names := _NAMES.findall(cells[0])):
            assert cells[2] in ("all", "–") or _NAMES.search(cells[2]), line
            may = None if cells[2] == "all" else frozenset(_NAMES.findall(cells[2]))
            found.update((name.removesuffix("/").removesuffix(".py"), may) for name in names)
    return found


def small_files() -> tuple[frozenset[str], frozenset[str]]:
    """The files that serve all rooms, and what they may import besides one another."""
    paragraph = PAGE.partition("Small files serve all rooms:")[2].partition("\n\n")[0]
    names = _NAMES.findall(paragraph)
    files = frozenset(name.removesuffix(".py") for name in names if name.endswith(".py"))
    return files, frozenset(name for name in names if not name.endswith(".py"))


ROOMS = rooms()
SMALL, SMALL_MAY = small_files()


@functools.cache
def room_of(module: tuple[str, ...]) -> str:
    """The innermost room that a module is in; the first part of its path if it is in none."""
    for length in range(len(module), 0, -1):
        if "/".join(module[:length]) in ROOMS:
            return "/".join(module[:length])
    return module[0]


def module_of(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """The module of a dotted name within the package, if it is one."""
    return next((found for found in (parts, (*parts, "__init__")) if found in MODULES), None)


@functools.cache
def imports_of(module: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """All of them, also those inside functions: modules by their paths; that of a package ends in `__init__`."""
    tree = ast.parse(SOURCE.joinpath(*module).with_suffix(".py").read_text(encoding="utf-8"))
    return frozenset(_target(name) for node in ast.walk(tree) for name in _names(node, module[:-1]))


def _target(name: tuple[str, ...]) -> tuple[str, ...]:
    """The module that a dotted name is, or is a name in."""
    found = module_of(name) or module_of(name[:-1])
    assert found is not None, f"{'.'.join(name)} is no module of the package"
    return found


def _names(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What an import statement takes from this package, each by its path in it."""
    if isinstance(node, ast.Import):
        names = [tuple(alias.name.split(".")) for alias in node.names]
        yield from (name[1:] for name in names if name[0] == SOURCE.name)
    elif isinstance(node, ast.ImportFrom):
        base = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            base = (*package[: len(package) - node.level + 1], *base)
        elif base[:1] == (SOURCE.name,):
            base = base[1:]
        else:
            return
        yield from ((*base, alias.name) for alias in node.names)


def may_import(importing: str, imported: str) -> bool:
    if importing == imported or imported in SMALL or imported.startswith(f"{importing}/"):
        return True
    if importing in SMALL:
        return imported in SMALL_MAY
    may = ROOMS[importing]
    return may is None or imported in may


def test_every_module_has_a_room():
    assert not ROOMS.keys() & SMALL
    homeless = {room_of(module) for module in MODULES} - ROOMS.keys() - SMALL
    assert not homeless, f"neither in the table of rooms nor among the small files: {sorted(homeless)}"


def test_every_room_is_there():
    named = {*ROOMS, *SMALL, *SMALL_MAY, *(name for may in ROOMS.values() for name in may or ())}
    missing = [name for name in named if not ((SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file())]
    assert not missing, f"named in the table of rooms, but not there: {sorted(missing)}"
    unknown = {name for may in ROOMS.values() for name in may or ()} - ROOMS.keys()
    assert not unknown, f"rooms that may be imported, but are none: {sorted(unknown)}"


@pytest.mark.parametrize("room", sorted({*ROOMS, *SMALL}))
def test_imports_are_allowed(room):
    forbidden = {
        f"{'/'.join(module)}.py: {'.'.join(found)}"
        for module in MODULES
        if room_of(module) == room
        for found in imports_of(module)
        if not may_import(room, room_of(found))
    }
    assert not forbidden, "\n".join(sorted(forbidden))


@pytest.mark.parametrize("room", sorted(room for room in ROOMS if ROOMS[room]))
def test_what_may_be_imported_is(room):
    """A permission that nobody needs is a line of the table that is not true."""
    sharing = [other for other in ROOMS if ROOMS[other] is ROOMS[room]]  # of one line
    users = [module for module in MODULES if room_of(module) in sharing]
    used = {room_of(found) for module in users for found in imports_of(module)}
    assert not (ROOMS[room] or frozenset()) - used


def test_no_import_circle():
    """Neither at module level nor within functions or under `TYPE_CHECKING`: nothing is imported late to hide one."""
    finished: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], path: tuple[tuple[str, ...], ...]) -> None:
        if module in path:
            circle = (*path[path.index(module) :], module)
            raise AssertionError(" -> ".join(".".join(name) for name in circle))
        if module not in finished:
            for found in imports_of(module):
                visit(found, (*path, module))
            finished.add(module)

    for module in sorted(MODULES):
        visit(module, ())


# Handlers of any exception. Most are around arbitrary code (a kernel's body, a candidate, what another process sends) or hand the error on to another
# thread; `raise` marks those that clean up or report and raise it again.
BROAD = {
    "dispatch/files.py": ["raise"],
    "launch/_workers.py": ["hands on"],
    "launch/staging.py": ["raise"],
    "serving/engine.py": ["raise", "raise", "raise"],
    "serving/server/worker.py": ["raise"],
    "serving/text/tokenizer.py": ["raise"],
    "testing/_interpreter.py": ["raise"],
    "testing/interpret.py": ["raise"],
    "tuning/isolated/isolation.py": ["arbitrary"],
    "tuning/isolated/worker.py": ["raise"],
    "tuning/processes.py": ["raise"],
    "tuning/threads.py": ["arbitrary"],
}


def test_few_handlers_take_any_exception():
    found: dict[str, list[bool]] = {}
    for module in MODULES:
        name = "/".join(module) + ".py"
        for node in ast.walk(ast.parse(SOURCE.joinpath(name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                found.setdefault(name, []).append(raises)
    assert found == {name: [why == "raise" for why in reasons] for name, reasons in BROAD.items()}


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or any(
        isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in ast.walk(kind)
    )


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_files_named_in_a_readme_are_there(readme):
    """A name without a folder may be in that of the name before it."""
    missing = []
    for line in readme.read_text(encoding="utf-8").splitlines():
        folder = readme.parent
        for name in _NAMES.findall(line.split(" | ")[0]) if line.startswith("| `") else ():
            if not re.search(r"\.py$|/$", name):
                continue
            there = next((path for base in (readme.parent, folder) for path in base.glob(name)), None)
            if there is None:
                missing.append(name)
            else:
                folder = there if there.is_dir() else there.parent
    assert not missing
