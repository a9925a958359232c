"""The hyperparameters of the modules of a model as JSON, and how those of two models differ."""

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

_EXECUTION = frozenset({
    *("plan", "platform", "mesh", "remat", "scan_layers", "preferred_element_type"),
    *("parallel", "expert_parallel", "sequence_axis", "token_order", "split"),
    *("deterministic", "dropout_rate", "inference", "max_segments", "stop_tokens", "unit_offset_norms"),
})  # fmt: skip
"""Fields that say how a model is run, trained, filled or stopped, not what its weights compute. So do all whose names end in `dtype`."""

_OMITTED = object()


def hyperparameters_of(model: Any) -> dict[str, dict[str, Any]]:
    """For the path of every module in the model, its fields that JSON can represent: numbers, strings, functions by qualified name, and tuples,
    mappings and dataclasses of them. Fields that contain arrays or modules are left out, as are those that say how the model is run."""
    return {path: fields for path, module in _modules("", model) if (fields := _fields_of(module, False))}


def differences(path: str, expected: Any, received: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name and both values of everything that differs. Entries that only one side knows are ignored."""
    if isinstance(expected, dict) and isinstance(received, dict):
        for name in (name for name in expected if name in received):
            yield from differences(f"{path}.{name}", expected[name], received[name])
    elif isinstance(expected, list) and isinstance(received, list) and len(expected) == len(received):
        for n, (one, other) in enumerate(zip(expected, received)):
            yield from differences(f"{path}[{n}]", one, other)
    elif expected != received:
        yield path, expected, received


def _modules(path: str, tree: Any) -> Iterator[tuple[str, eqx.Module]]:
    if isinstance(tree, eqx.Module):
        yield path, tree
    for keys, child in jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]:
        if child is not tree:
            yield from _modules(path + jtu.keystr(keys), child)


def _fields_of(instance: Any, static: bool) -> dict[str, Any]:
    """The fields of a module or of a dataclass. Numbers are leaves, unless a static field holds them."""
    found = {}
    for field in dataclasses.fields(instance):
        name = field.name
        if name not in _EXECUTION and not name.endswith("dtype") and hasattr(instance, name):
            value = _value_of(getattr(instance, name), static or field.metadata.get("static", False))
            if value is not _OMITTED:
                found[name] = value
    return found


def _value_of(x: Any, static: bool) -> Any:
    if isinstance(x, str):
        return x
    x = x.item() if isinstance(x, np.generic) else x
    if x is None or isinstance(x, bool | int | float | complex):  # None may be what was filtered out
        return _number_of(x) if static else _OMITTED
    if isinstance(x, jax.sharding.PartitionSpec):  # a tuple in some versions of JAX
        return _OMITTED
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return _mapping_of(cast(Any, x)._asdict(), static)
    if isinstance(x, Mapping):
        return _mapping_of(x, static)
    if isinstance(x, tuple | list):
        return _sequence_of(x, static)
    if isinstance(x, frozenset | set):
        values = _sequence_of(list(x), static)
        return values if values is _OMITTED else sorted(values, key=repr)
    static = static or jtu.all_leaves([x])  # numbers inside of what JAX does not open are not saved
    if isinstance(x, functools.partial):
        return _sequence_of([x.func, x.args, x.keywords], static)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _fields_of(x, True) if static else _OMITTED
    return x.name if isinstance(x, enum.Enum) else _name_of(x)


def _number_of(x: Any) -> Any:
    if isinstance(x, int) and not -(2**63) <= x < 2**64:
        return _OMITTED
    return str(x) if isinstance(x, complex) or (isinstance(x, float) and not math.isfinite(x)) else x


def _mapping_of(x: Mapping[Any, Any], static: bool) -> dict[str, Any]:
    values = {key: _value_of(value, static) for key, value in x.items() if isinstance(key, str)}
    return {key: value for key, value in values.items() if value is not _OMITTED}


def _sequence_of(x: tuple | list, static: bool) -> Any:
    """A list; a dictionary for pairs of a name and a value, as hashable options are written."""
    if x and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in x):
        return _mapping_of(dict(x), static)
    values = [_value_of(value, static) for value in x]
    return _OMITTED if any(value is _OMITTED for value in values) else values


def _name_of(x: Any) -> Any:
    """The qualified name of a function or a class. What was made inside a function has none that another program would give it."""
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    return name if callable(x) and isinstance(name, str) and "<" not in name else _OMITTED
