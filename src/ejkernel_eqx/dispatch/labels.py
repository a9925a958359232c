"""Labels: the name scope of every kernel call records what was chosen, and can be found in lowered and compiled text.

A label reads `ejkernel_eqx.flash_attention.xla=[256,512],[256,256]=5d1c03a7=0f3b...`: operation and platform, the values of the
configuration in the order of its fields (nested ones in brackets), a checksum of the field names, and the digest of the problem. It
contains only characters that name scopes, MLIR locations and HLO metadata preserve; all others are written as `%xx`.
"""

import contextlib
import dataclasses
import enum
import json
import re
import types
import typing
import zlib
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._errors import not_installed
from .registry import Implementation, kernel_registry
from .selection import announce, Selection

_PREFIX = "ejkernel_eqx."
_LABEL = re.compile(
    r"(?<![\w.%~-])ejkernel_eqx\.([A-Za-z0-9_.~%-]+)\.([a-z0-9_-]+)"  # operation, platform
    r"=([A-Za-z0-9_.~%+!,\[\]-]*)=([0-9a-f]{8})=([0-9a-f]{16})(?![A-Za-z0-9])"  # values, fields, problem
)
_WORDS = {"none": None, "true": True, "false": False}


@dataclasses.dataclass(frozen=True)
class LabelledConfig:
    """The content of a label. `problem` is `Problem.digest()`; if `config` is `None`, `reason` says why it cannot be read."""

    label: str
    operation: str
    platform: str
    problem: str
    config: Any | None
    reason: str = ""


def label_of(selection: Selection) -> str:
    """The label of a choice, the same in every process."""
    problem = selection.problem
    head = f"{_PREFIX}{quote(problem.operation, safe='')}.{selection.platform.value}"
    return f"{head}={'='.join(_written(selection.config))}={problem.digest()}"


class _Label(str):
    """A label in a traced program, which carries the choice itself."""

    selection: Selection


def kernel_scope(selection: Selection) -> contextlib.AbstractContextManager:
    """The name scope in which the kernels of a choice are called. It records the choice in the traced program, where `choices_in` reads it.
    Names are not part of the key of JAX's compilation cache."""
    announce(selection)
    label = _Label(label_of(selection))
    label.selection = selection
    return jax.named_scope(label)


def choices_in(jaxpr: Any) -> Iterator[Selection]:
    """The choices whose kernels a traced program launches, in order, possibly with repetitions. Calls that JAX has replaced (the unmapped
    call under `vmap`, the undifferentiated one under `grad`) are no longer in the program."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for scope in equation.source_info.name_stack.stack:
            if isinstance(scope.name, _Label):
                yield scope.name.selection
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from choices_in(inner)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def find_labels_in_lowered(lowered: Any) -> list[str]:
    """The distinct labels in a `jax.stages.Lowered` or `jax.stages.Compiled`, or in their text, in order.

    Lowered text contains names only with debug information: `lowered.as_text(debug_info=True)`.
    """
    text = lowered
    if isinstance(lowered, jax.stages.Lowered):
        text = lowered.as_text(debug_info=True)
    elif isinstance(lowered, jax.stages.Compiled):
        text = lowered.as_text()
    if not isinstance(text, str):
        raise ValueError(
            f"lowered: expected a jax.stages.Lowered, a jax.stages.Compiled that has text, or a string, received {lowered!r}; "
            "use jax.jit(f).lower(...)."
        )
    return extract_labels_from_hlo_text(text)


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """The distinct labels in a text, in order."""
    return list(dict.fromkeys(match.group() for match in _LABEL.finditer(text)))


def labels_to_configs(labels: Iterable[str]) -> list[LabelledConfig]:
    """The content of each label, with its configuration read as the class of the currently registered implementation.

    Any other text yields a record without a configuration that says why. So does a label of an unknown operation or
    platform, or of a configuration class that has changed since.
    """
    return [_read(label) for label in labels]


def _written(config: Any) -> tuple[str, str]:
    """The values of a configuration, and the checksum of its fields."""
    text = _write(config)
    values = text[1:-1] if dataclasses.is_dataclass(config) else text
    return values, f"{zlib.crc32(_fields(config).encode()):08x}"


def _write(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = tuple([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, tuple):
        return f"[{','.join(map(_write, value))}]"
    if isinstance(value, enum.Enum):
        return f"+{quote(value.name, safe='')}"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A string, or a value that can be shown but not read back.
    return f"~{quote(value, safe='')}" if isinstance(value, str) else f"!{quote(repr(value), safe='')}"


def _fields(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_fields, value))}]"
    if not dataclasses.is_dataclass(value):
        return ""
    names = [field.name + _fields(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return f"{type(value).__name__}({','.join(names)})"


def _read(label: str) -> LabelledConfig:
    match = _LABEL.fullmatch(label)
    if match is None:
        return LabelledConfig(label, "", "", "", None, "is not a label of this package")
    operation, platform, values, checksum, problem = match.groups()
    operation = unquote(operation)

    def record(config: Any | None, reason: str = "") -> LabelledConfig:
        return LabelledConfig(label, operation, platform, problem, config, reason)

    if operation not in kernel_registry.list_operations():
        return record(None, f"the operation {operation!r} is not registered")
    if platform not in [i.platform for i in kernel_registry.ordered(operation)]:
        return record(None, f"{operation} has no platform {platform!r}")
    reasons = []
    for implementation in kernel_registry.of_platform(operation, platform):
        try:
            return record(_config(values, checksum, implementation))
        except ModuleNotFoundError as error:
            reasons.append(not_installed(error.name))
        except (ValueError, TypeError, NameError) as error:  # from the class itself or its annotations
            reasons.append(f"does not fit the current configuration class: {error}")
    return record(None, reasons[0])


def _config(values: str, checksum: str, implementation: Implementation) -> Any:
    config_type = implementation.hooks.config_type
    tree = _parse(f"[{values}]")
    config = _build([config_type], tree if dataclasses.is_dataclass(config_type) else tree[0])
    if _written(config) != (values, checksum):
        raise ValueError(f"its fields are now {_fields(config)}")
    return config


def _parse(text: str) -> Any:
    """Nested lists of the words in a bracketed text."""
    try:
        return json.loads(re.sub(r"[^\[\],]+", lambda word: json.dumps(word[0]), text))
    except json.JSONDecodeError:
        raise ValueError("its brackets do not match") from None


def _build(kinds: list[Any], tree: Any) -> Any:
    """A value of one of the annotated kinds."""
    if isinstance(tree, str):
        return _leaf(tree, [k for k in kinds if isinstance(k, type) and issubclass(k, enum.Enum)])
    for kind in kinds:
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        if dataclasses.is_dataclass(kind) and len(fields) == len(tree):
            hints = typing.get_type_hints(kind)
            parts = {f.name: _build(_kinds(hints[f.name]), t) for f, t in zip(fields, tree, strict=True)}
            return typing.cast(Any, kind)(**parts)
    tuples = [kind for kind in kinds if kind is tuple or typing.get_origin(kind) is tuple]
    if not tuples:
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ValueError(f"{len(tree)} values for {names}")
    inner = [kind for member in typing.get_args(tuples[0]) for kind in _kinds(member)]
    return tuple(_build(inner, part) for part in tree)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union; else the annotation itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if is_union else [annotation]


def _leaf(token: str, enums: list[Any]) -> Any:
    if token in _WORDS:
        return _WORDS[token]
    mark, rest = token[0], unquote(token[1:])
    if mark == "~":
        return rest
    if mark == "+":
        found = [cls[rest] for cls in enums if rest in cls.__members__]
        if not found:
            raise ValueError(f"no enumeration has a member {rest!r}")
        return found[0]
    if mark == "!":
        raise ValueError(f"{rest} cannot be read from text")
    return int(token) if re.fullmatch(r"-?\d+", token) else float(token)
