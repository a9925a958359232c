"""The operations as functions: constructor options and call arguments in one call, `ejx.flash_attention(q, k, v, causal=True)`.

`function_of` makes each function from its class. `functional.pyi`, which is generated from the classes too
(`python -m tests.functional_stub`), gives editors and type checkers their signatures."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast, TypeVar

import jax.core

from ._kernel import Kernel, make_plan, Plan, with_plan
from ._operations import CLASSES
from ._signatures import refusal

MODULES_KEPT = 256
"""The maximum number of modules that functions cache; the least recently used one is dropped first."""

K = TypeVar("K", bound=Kernel)
_PARAMETER = inspect.Parameter
_NOT_AN_OPTION = re.compile(r"^- `tune_for`.*\n?(^ .*\n?)*", re.M)


def function_of(cls: type[Kernel]) -> Callable[..., Any]:
    """Makes a function from an operation. It takes the arguments of a call, then the constructor's options by name.

    ```python
    my_operation = ejx.functional.function_of(MyOperation)
    out = my_operation(x, weight, block_size=64)  # MyOperation(block_size=64)(x, weight)
    ```

    A module is built for each set of options and cached. A call chooses as a module that is built at that time. An
    active `ejx.overlay_cache` or `ejx.policy_override` applies. So do all tuning results so far. Inside `jit`, this is
    the time of tracing. `ejx.tune(function, *args, **kwargs)` tunes for a call.

    **Arguments:** `cls`: an operation whose options are hashable and static.

    **Returns:** the function, named after the operation. It raises the errors of the class and its call. It raises
    `TypeError` for unknown arguments, and `ValueError` for an option that is not hashable, such as an array.
    """
    call, options = _parameters(cls.__call__), _parameters(cls.__init__)
    options.pop("tune_for", None)  # only for modules, as it fixes the choice for all calls
    both = call.keys() & options.keys()
    signature = _signature(cls, call, options)

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            raise TypeError(_refusal(cls, signature, args, kwargs)) from None
        chosen = {name: kwargs.pop(name) for name in options.keys() & kwargs.keys()}
        for name in both & chosen.keys():
            if not isinstance(chosen[name], str | None):  # an argument of the call; the option stays unset
                kwargs[name], chosen[name] = chosen[name], None
        return cast(Callable[..., Any], _module(cls, chosen))(*args, **kwargs)

    vars(function)["__signature__"] = signature
    vars(function)["operation"] = function.__name__ = function.__qualname__ = cls.operation
    function.__doc__ = _document(cls)
    return function


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(method).parameters.items())[1:])


def _signature(
    cls: type[Kernel], call: Mapping[str, inspect.Parameter], options: Mapping[str, inspect.Parameter]
) -> inspect.Signature:
    both = {
        name: call[name].replace(
            default=options[name].default, annotation=options[name].annotation | call[name].annotation
        )
        for name in call.keys() & options.keys()
    }
    new = [p.replace(kind=_PARAMETER.KEYWORD_ONLY) for name, p in options.items() if name not in both]
    parameters = sorted([both.get(name, p) for name, p in call.items()] + new, key=lambda p: p.kind)
    return inspect.signature(cls.__call__).replace(parameters=parameters)


def _refusal(
    cls: type[Kernel], signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    name = cls.operation
    if "tune_for" in kwargs:
        return f"{name}: expected the arguments of a call, received tune_for=; use ejx.tune({name}, ...), or {cls.__name__}(tune_for=...)."
    return refusal(name, signature, args, kwargs)


def _document(cls: type[Kernel]) -> str:
    """The docstring of the class, with its options and arguments."""
    parts = (cls.__init__.__doc__, cls.__call__.__doc__)
    options, call = (inspect.cleandoc(part or "").removeprefix("**Arguments:**").strip() for part in parts)
    options = _NOT_AN_OPTION.sub("", options)
    head = (
        f"[`ejkernel_eqx.{cls.__name__}`][] as a function of its call's arguments, with its options by name."
    )
    return f"{head}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n\n**Options:**\n\n{options}\n\n**Arguments:**\n\n{call}\n"


def _module(cls: type[K], options: Mapping[str, Any]) -> K:
    for name, value in options.items():
        _check_option(cls, name, value)
    platform, config = options.get("platform"), options.get("config")
    # As an edition, the plan equals only plans with the same choices, so that compiled programs do not hide later tuning results.
    plan = make_plan(cls.operation, platform=platform, config=config).as_edition()
    # A module that is kept keeps alive what a function among its options closes over.
    make = _kept.__wrapped__ if any(map(callable, options.values())) else _kept
    return make(cls, plan, **options)


@functools.lru_cache(maxsize=MODULES_KEPT, typed=True)
def _kept(cls: type[K], plan: Plan, **options: Any) -> K:
    return with_plan(cls(**options), plan)


def _check_option(cls: type[Kernel], name: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name}: expected a Python value, as this option of {cls.__name__} determines what is compiled, received a traced array; "
            "close over it, or mark it static (jax.jit's static_argnames)."
        )
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{name}: expected a hashable value, as modules are cached by their options, received {type(value).__name__}; pass numbers, "
            f"strings or tuples, or build {cls.__name__}({name}=...) yourself."
        ) from None


def __getattr__(name: str) -> Callable[..., Any]:
    """The function of an operation, made when it is first used."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, _, cls = CLASSES[name].partition(":")
    operation = getattr(importlib.import_module(f".{room}", __package__), cls)
    return globals().setdefault(name, function_of(operation))


def __dir__() -> list[str]:
    return sorted([*globals(), *CLASSES])
