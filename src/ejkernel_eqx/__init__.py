"""Deep-learning kernels for JAX as Equinox layers.

The public names are listed in `__init__.pyi`; each is imported when it is first used."""

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import types
from typing import Any


def _modules() -> dict[str, str]:
    """The module that defines each public name; empty for a module of the package itself."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


_MODULES = _modules()
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name] or name}")
        # The import has bound modules by now, also packages like `attention`, which have the name of a function.
        return globals().setdefault(name, getattr(module, name, module))
    if name == "__version__":
        return _version()
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """The version of the installed package; `"0+unknown"` where its source is used without being installed."""
    try:
        return importlib.metadata.version("ejkernel-eqx")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


class _Callable(types.ModuleType):
    # A package that is called as the function of its name, whose documentation it has.

    @property
    def _function(self) -> Any:
        functions = importlib.import_module(f"{__name__}.functional")
        return getattr(functions, self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._function.__doc__

    @property
    def __signature__(self) -> Any:
        return self._function.__signature__


class _Package(types.ModuleType):
    """This package. Subpackages that have the name of an operation, `attention` and `matmul`, can be called like it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if _MODULES.get(name) == "functional" and isinstance(value, types.ModuleType):
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
