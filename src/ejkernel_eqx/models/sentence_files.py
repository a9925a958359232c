"""Reads the files of sentence-transformers beside a model, which say how a text becomes a vector."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._entries import entries_of, shown
from .._errors import CheckpointError
from ..nn.initial import linear
from ..weights import Weights
from ..weights.fill import fill
from ..weights.source import of_file, read_json
from .pooler import Pooler

_MOST_BYTES, _MOST_MODULES = 2**20, 16
_POOLINGS = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}
_FLAGS = (
    "cls_token",
    "mean_tokens",
    "max_tokens",
    "lasttoken",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
)


def read_pooler(folder: pathlib.Path) -> Pooler | None:
    """The `Pooler` that `modules.json` and the folders in it describe; `None` without that file."""
    path, layers = folder / "modules.json", []
    if not path.is_file():
        return None
    steps = of_file(path, _steps, read_json(path, _MOST_BYTES))
    read = lambda file, of: of_file(file, of, entries_of(read_json(file, _MOST_BYTES)))
    for kind, place in steps:
        if kind == "Dense":
            layers += [_dense(folder / place), *read(folder / place / "config.json", _activations)]
    _, (_, place), *_ = steps
    return Pooler(read(folder / place / "config.json", _pooling), steps[-1][0] == "Normalize", tuple(layers))


def _steps(modules: Any) -> list[tuple[str, str]]:
    """The type and the folder of each module."""
    is_list = isinstance(modules, list) and all(isinstance(module, Mapping) for module in modules)
    listed = [entries_of(module) for module in modules[:_MOST_MODULES]] if is_list else []
    steps = [(str(module.get("type")).rpartition(".")[2], module.get("path") or "") for module in listed]
    is_beside = all(place == pathlib.PurePath(place).name and place != ".." for _, place in steps)
    kinds = ", ".join(kind for kind, _ in steps)
    if not is_beside or not re.fullmatch("Transformer, Pooling(, Dense)*(, Normalize)?", kinds):
        raise CheckpointError(
            "expected a list of a Transformer, a Pooling, any number of Dense and perhaps a Normalize, each in a folder beside this file, received "
            f"{kinds or shown(modules)}; without the file, embed takes its own arguments."
        )
    return steps


def _pooling(config: Mapping[str, Any]) -> str:
    names = [name.partition("_token")[0] for name in _FLAGS if config.get(f"pooling_mode_{name}", False)]
    names = [config["pooling_mode"]] if config.get("pooling_mode") else names  # as newer versions write it
    if len(names) != 1 or names[0] not in _POOLINGS:
        raise CheckpointError(
            f"pooling_mode: expected one of {', '.join(_POOLINGS)}, received {' and '.join(map(shown, names)) or 'none'}; no other is supported."
        )
    return _POOLINGS[names[0]]


def _activations(config: Mapping[str, Any]) -> list[Callable[..., Any]]:
    name = str(config.get("activation_function")).rpartition(".")[2]
    if name not in ("Identity", "Tanh"):
        raise CheckpointError(
            f"activation_function: expected Identity or Tanh, received {shown(name)}; no other is supported."
        )
    return [eqx.nn.Lambda(jnp.tanh)] if name == "Tanh" else []


def _dense(folder: pathlib.Path) -> eqx.nn.Linear:
    weights = Weights.open(folder)
    shape = weights.shape("linear.weight") if weights.has("linear.weight") else ()
    if len(shape) != 2:
        raise CheckpointError(
            f"{str(folder)!r}: expected a matrix 'linear.weight', received shape {shape}; download it again."
        )
    sizes: Any = (*shape[::-1], weights.has("linear.bias"), jnp.float32)
    make = lambda: linear(jax.random.key(0), *sizes)
    layer = fill(eqx.filter_eval_shape(make), weights.at("linear"))
    weights.check()
    return layer
