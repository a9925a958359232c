"""Kernel configurations: frozen dataclasses that convert to JSON and back, strictly."""

import dataclasses
import json
import typing
from typing import Any, TypeVar

C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration's fields, nested configurations as nested dicts."""
    check_config(config)
    return dataclasses.asdict(config)


def to_json(config: Any) -> str:
    """Readable JSON of a configuration, with its fields in order."""
    return json.dumps(to_dict(config))


def stable_json(value: Any) -> str:
    """Canonical JSON (sorted, no spaces): equal values give equal text in every process."""
    return json.dumps(
        to_dict(value) if dataclasses.is_dataclass(value) else value, sort_keys=True, separators=(",", ":")
    )


def from_json(text: str, cls: type[C]) -> C:
    """The configuration of class `cls` in `text`; `ValueError` for anything else."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"from_json: expected the JSON of a {cls.__name__}, received {text!r} ({error})."
        ) from None
    return from_dict(data, cls)


def from_dict(data: Any, cls: type[C]) -> C:
    """Works as `from_json`, from a dict. Unknown fields, missing fields and wrong types are errors."""
    if not isinstance(data, dict):
        raise ValueError(f"config: expected an object with the fields of {cls.__name__}, received {data!r}.")
    types = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(typing.cast(Any, cls))}
    unknown, missing = sorted(data.keys() - names), sorted(required_fields(cls) - data.keys())
    if unknown or missing:
        raise ValueError(
            f"config: expected the fields {sorted(names)} of {cls.__name__}, received unknown {unknown} and missing {missing}; "
            "it was written by another version."
        )
    return cls(**{name: _convert(name, value, types[name]) for name, value in data.items()})


def required_fields(cls: Any) -> set[str]:
    """The names of a dataclass's fields without a default."""
    absent = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(cls) if f.default is absent and f.default_factory is absent}


def _convert(name: str, value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_dict(value, typing.cast(type, kind))
    if kind is float and type(value) is int:  # as `scale: float = 1` is written
        return value
    if kind in (int, bool, str, float) and type(value) is not kind:
        raise ValueError(f"config field {name}: expected {kind.__name__}, received {value!r}.")
    if kind is tuple or typing.get_origin(kind) is tuple:  # JSON knows lists only
        return _as_tuple(value)
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def check_config(config: Any) -> None:
    """`ValueError` for anything but an instance of a frozen dataclass."""
    params = None if isinstance(config, type) else getattr(config, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise ValueError(f"config: expected an instance of a frozen dataclass, received {config!r}.")
