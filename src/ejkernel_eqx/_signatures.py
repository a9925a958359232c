"""Defines what a call says whose arguments its signature does not take; and `Module`, whose methods say it."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
Elsewhere = Mapping[str, Callable[..., Any]]
"""Other functions whose parameters a caller may have meant, each under the remedy that says so, in which `{0}` is the parameter."""
_KIND = inspect.Parameter
_BY_POSITION = (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD)
_SHOWN = 3


def nearest(word: Any, known: Iterable[str]) -> str:
    """The end of a message about a wrong word: `; did you mean NAME?` with the name that it resembles, if there is one."""
    near = _resembled(word, known)
    return f"; did you mean {near}?" if near else "."


def check_one_of(name: str, word: Any, known: Iterable[str]) -> None:
    if word not in known:
        raise ValueError(
            f"{name}: expected one of {', '.join(known)}, received {word!r}{nearest(word, known)}"
        )


def _resembled(word: Any, known: Iterable[str]) -> str | None:
    """The name that is spelt nearly as a word, or else begins or ends with it."""
    plain = {name.replace("_", "").lower(): name for name in known}
    word = str(word).replace("_", "").lower()
    near = difflib.get_close_matches(word, plain, n=1, cutoff=0.75)
    near = near or [
        name for name in plain if len(word) > 2 and (name.startswith(word) or name.endswith(word))
    ]
    return plain[near[0]] if near else None


def refusal(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    elsewhere: Elsewhere = types.MappingProxyType({}),
    called: str = "",
) -> str | None:
    """The reason why arguments do not fit a signature, in a sentence about `name`, which is written as `called`; `None` if they do."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    else:
        return None
    known = signature.parameters
    first = [p.name for p in known.values() if p.kind in _BY_POSITION]
    passed = {*first[: len(args)], *kwargs}
    missing = [n for n, p in known.items() if p.default is _KIND.empty and n not in passed]
    written = f"{called or name}({', '.join(_written(known))})"
    if unknown := [argument for argument in kwargs if argument not in known]:
        received = ", ".join(map(repr, unknown))
        return f"{name}: expected some of {', '.join(known)}, received {received}{_meant(unknown[0], missing, known, elsewhere)}"
    if len(args) > len(first):
        most = f"{len(first)} argument{'s' * (len(first) != 1)} by position ({', '.join(first)})"
        others = [n for n, p in known.items() if p.kind is _KIND.KEYWORD_ONLY]
        remedy = (
            f"pass others by name, such as {', '.join(others[:_SHOWN])}" if others else "leave out the others"
        )
        remedy = f"write {written}" if missing else remedy
        return f"{name}: expected at most {most if first else 'none by position'}, received {len(args)}; {remedy}."
    if missing:
        received = ", ".join(n for n in known if n in passed)
        return f"{name}: expected {' and '.join(missing)}, received {f'only {received}' if received else 'no arguments'}; write {written}."
    return f"{name}: {problem}; write {written}."


def _written(known: Mapping[str, inspect.Parameter]) -> list[str]:
    """The arguments that a call needs, as they are written."""
    needed = [p for p in known.values() if p.default is _KIND.empty]
    return [p.name if p.kind in _BY_POSITION else f"{p.name}=..." for p in needed]


def _meant(word: str, missing: Iterable[str], known: Iterable[str], elsewhere: Elsewhere) -> str:
    if near := _resembled(word, missing) or _resembled(word, known):
        return f"; did you mean {near}?"
    for remedy, function in elsewhere.items():
        if near := _resembled(word, inspect.signature(function).parameters):
            return f"; {remedy.format(near)}."
    return "."


def explained(**parts: type) -> Callable[[F], F]:
    """A decorator of a function: a call with arguments that it does not take raises a `TypeError` that says what it takes.

    `parts`: for an argument, the class of its values, whose options a caller may have passed to the function itself.
    """
    elsewhere = {f"write {name}={cls.__name__}({{0}}=...)": cls for name, cls in parts.items()}

    def decorate(function: F) -> F:
        def why(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
            return refusal(function.__name__, inspect.signature(function), args, kwargs, elsewhere)

        return _saying(function, why)

    return decorate


def explained_options(cls: C) -> C:
    """A decorator of a class that is no `Module`: the same for the arguments that make an instance."""
    cls.__init__ = _explained_method("__init__", cls.__init__)
    return cls


class Module(eqx.Module):
    """Base of every operation and layer: an `eqx.Module` whose public methods say which arguments they take, where a call's do not fit."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if name.startswith("_") and name not in ("__init__", "__call__"):
                continue
            if isinstance(method, types.FunctionType):
                setattr(cls, name, _explained_method(name, method))
            elif isinstance(method, classmethod):
                setattr(cls, name, classmethod(_explained_method(name, method.__func__)))

    def __hash__(self) -> int:
        try:
            return super().__hash__()
        except TypeError:
            name = type(self).__name__
            raise TypeError(
                f"{name}: expected no arrays where a function is hashed, as jax.jit(layer) does, received a {name} with weights; use "
                "equinox.filter_jit(layer), or pass it as an argument: jax.jit(lambda layer, x: layer(x))(layer, x)."
            ) from None


def _explained_method(name: str, method: F) -> F:
    def why(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        cls = args[0] if isinstance(args[0], type) else type(args[0])
        about, written, others = f"{cls.__name__}.{name}", "", {}
        if name == "__init__":
            if sum(isinstance(value, jax.Array) for value in args[1:]) > 1:
                call = ", ".join(_written(inspect.signature(cls.__call__).parameters)[1:])
                return f"{cls.__name__}: expected options, received arrays; build it, and call it with them: {cls.__name__}(...)({call})."
            about = cls.__name__
            others = {f"{{0}} is an argument of the call: {about}(...)(..., {{0}}=...)": cls.__call__}
        elif name == "__call__":
            about, written = cls.__name__, f"{cls.__name__}(...)"
            others = {f"{{0}} is an option: {about}({{0}}=...)": cls.__init__}
        full = inspect.signature(method)
        signature = full.replace(parameters=list(full.parameters.values())[1:])
        return refusal(about, signature, args[1:], kwargs, others, written)

    return _saying(method, why)


def _saying(function: F, why: Callable[[tuple[Any, ...], Mapping[str, Any]], str | None]) -> F:
    """The function, whose `TypeError` for arguments that do not fit is replaced. Whether they fit is asked only after an error."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError):
            reason = why(args, kwargs)
            if reason is None:
                raise
        raise TypeError(reason)

    return call  # pyright: ignore[reportReturnType]
