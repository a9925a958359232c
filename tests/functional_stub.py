"""Writes `functional.pyi`, the signatures of the operations' functions for type checkers, from the source of their classes.

`python -m tests.functional_stub` after a change of a signature; a test says when that is due. The stub is written, not inferred, as no
type of Python's says "the parameters of two methods together".
"""

import ast
import functools
import inspect
import pathlib
import sys
from typing import Any

import ejkernel_eqx as ejx
from ejkernel_eqx import Kernel

PACKAGE = pathlib.Path(ejx.__file__).parent
STUB = PACKAGE / "functional.pyi"
_HEAD = '''"""Written by `python -m tests.functional_stub` from the classes' own signatures: change these."""

# fmt: off
# ruff: noqa
from collections.abc import Callable
from typing import overload

from ._kernel import Kernel
{imports}
MODULES_KEPT: int

def function_of(cls: type[Kernel]) -> Callable[..., Any]: ...
'''

Parameters = dict[str, ast.arg]


def operations() -> list[type[Kernel]]:
    """Every operation that the package exports, by the name of its function."""
    found = {
        value
        for value in (getattr(ejx, name) for name in dir(ejx))
        if inspect.isclass(value) and issubclass(value, Kernel) and hasattr(value, "operation")
    }
    return sorted(found, key=lambda cls: cls.operation)


def stub() -> str:
    """The text of the stub."""
    lines: list[str] = []
    imports: set[str] = {"from typing import Any"}
    for cls in operations():
        signatures = [_Signature(cls, call) for call in _methods(cls, "__call__")]
        for signature in signatures:
            lines.append("")
            lines.extend(["@overload"] if len(signatures) > 1 else [])
            lines.extend(signature.lines())
            imports |= signature.imports
    ours = sorted(line for line in imports if line.startswith("from ."))
    others = sorted(imports - set(ours))
    return _HEAD.format(imports="\n".join([*others, *ours, ""])) + "\n".join(lines) + "\n"


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))


def _methods(cls: type, name: str) -> list[ast.FunctionDef]:
    """The overloads of a method, else the method itself."""
    overloads, plain = _definitions(cls, name)
    return overloads or plain


def _definitions(cls: type, name: str) -> tuple[list[ast.FunctionDef], list[ast.FunctionDef]]:
    owner, body = _owner(cls, name)
    inside = [node for part in body if isinstance(part, ast.If) for node in part.body]
    found = [node for node in (*inside, *body) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{owner.__name__}.{name} is not written in its class"
    overloads = [node for node in found if "overload" in map(ast.unparse, node.decorator_list)]
    return overloads, [node for node in found if node not in overloads]


def _owner(cls: type, name: str) -> tuple[type, list[ast.stmt]]:
    """The class that a method is written in, and its body."""
    method = getattr(inspect.unwrap(getattr(cls, name)), "__qualname__", "").split(".")[0]
    owner = next(base for base in cls.__mro__ if base.__name__ == method)
    tree = _tree(inspect.getsourcefile(owner) or "")
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner.__name__)
    return owner, node.body


class _Signature:
    """One signature of a function: of a call, with the options of the constructor."""

    def __init__(self, cls: type[Kernel], call: ast.FunctionDef) -> None:
        self.cls, self.call, self.imports = cls, call, set[str]()
        ((self.whole,), (self.init,)) = (_definitions(cls, name)[1] for name in ("__call__", "__init__"))

    def lines(self) -> list[str]:
        """Its lines."""
        options = {name: line for name, line in self._named(self.init).items() if name != "tune_for"}
        positional = {arg.arg: self._line(arg, default) for arg, default in _positional(self.call)}
        named = self._named(self.call, positional=False)
        if self.call.args.kwarg is not None:
            whole = self._named(self.whole, positional=False)
            named |= {name: line for name, line in whole.items() if name not in named}
        for name in [name for name in named if name in options]:
            of_call, of_option = named.pop(name), options.pop(name)
            words = [line.partition(": ")[2].partition(" = ") for line in (of_option, of_call)]
            options[name] = f"{name}: {words[0][0]} | {words[1][0].removesuffix(' | None')} = {words[0][2]}"
        returned = self._word(self.call.returns, self.cls, "__call__")
        arguments = [*positional.values(), "*", *named.values(), *options.values()]
        return [f"def {self.cls.operation}(", *(f"    {a}," for a in arguments), f") -> {returned}: ..."]

    def _named(self, method: ast.FunctionDef, positional: bool = True) -> dict[str, str]:
        pairs = _positional(method) if positional else []
        pairs += zip(method.args.kwonlyargs, method.args.kw_defaults)
        return {arg.arg: self._line(arg, default, method.name) for arg, default in pairs}

    def _line(self, arg: ast.arg, default: ast.expr | None, method: str = "__call__") -> str:
        word = self._word(arg.annotation, self.cls, method)
        return f"{arg.arg}: {word}" + ("" if default is None else f" = {ast.unparse(default)}")

    def _word(self, annotation: ast.expr | None, cls: type, method: str) -> str:
        assert annotation is not None, f"{cls.__name__}.{method} has a parameter without annotation"
        owner, _ = _owner(cls, method)
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                self.imports |= _imports(owner.__module__, node.id)
        return ast.unparse(annotation)


def _positional(method: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    arguments = method.args.args[1:]
    defaults: list[ast.expr | None] = [*method.args.defaults]
    return list(zip(arguments, [None] * (len(arguments) - len(defaults)) + defaults))


def _imports(module: str, name: str) -> set[str]:
    """The import, from the package's folder, of a name that an annotation in a module has."""
    tree: Any = _tree(sys.modules[module].__file__ or "")
    package = module.split(".")[1:]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            base = ".".join([*package[: len(package) - node.level], *filter(None, [node.module])])
            return {f"from {'.' + base if node.level else node.module} import {name}"}
    written = [node for node in tree.body if isinstance(node, ast.Assign | ast.ClassDef)]
    defined = {n.name if isinstance(n, ast.ClassDef) else ast.unparse(n.targets[0]) for n in written}
    return {f"from .{'.'.join(package)} import {name}"} if name in defined else set()


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
