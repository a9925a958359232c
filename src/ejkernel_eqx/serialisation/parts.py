"""The arrays of a checkpoint that is a folder: each process writes and reads the parts of its devices, by Orbax.

The folder holds `index.ejx`, a file as `save` writes it without these arrays, and a folder of them, whose number the index has. A new one is
written beside the old one, and then the index is replaced: what is interrupted leaves the old checkpoint.
"""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from .._errors import CheckpointError, require

INDEX = "index.ejx"
# Orbax stores no arrays of these dtypes.
_NOT_STORED = ("int2", "uint2", "uint4")


def is_stored(kind: str, dtype: str | None, shape: tuple[int, ...] | None) -> bool:
    """Returns whether an array is one of the parts; the index has all other leaves."""
    return kind == "array" and dtype not in _NOT_STORED and shape is not None and 0 not in shape


def _has_parts(name: str) -> bool:
    """Whether a folder is one of parts, also one that Orbax has begun, `1.orbax-checkpoint-tmp`."""
    return name.split(".")[0].isdigit()


def next_number(folder: str, check: Any) -> int:
    """The number of a new folder of parts, in a folder that is made if there is none. `check` raises an error for a folder that is no checkpoint."""
    os.makedirs(folder, exist_ok=True)
    if not os.path.exists(os.path.join(folder, INDEX)):
        if others := [name for name in os.listdir(folder) if not _has_parts(name)]:
            raise ValueError(
                f"path: expected a checkpoint, an empty folder or none, received {folder!r} with {others[0]!r}; name another folder."
            )
        return 1
    return number_in(folder, check()) + 1


def number_in(folder: str, header: Mapping[str, Any]) -> int:
    """The number of the parts that an index names."""
    number = header.get("parts")
    if type(number) is not int or number < 1:
        raise CheckpointError(
            f"{folder!r} is damaged: its index names no parts. Use an older checkpoint, or copy the folder again."
        )
    return number


def write(folder: str, number: int, arrays: Mapping[str, jax.Array]) -> None:
    """Writes the parts of this process's devices. All processes call it, and none returns before all have written."""
    checkpoints = _orbax()
    with checkpoints.StandardCheckpointer() as writer:
        writer.save(os.path.join(os.path.abspath(folder), str(number)), dict(arrays), force=True)


def finish(folder: str, number: int) -> None:
    """Removes older parts, when all processes have come here."""
    multihost_utils.sync_global_devices(f"ejkernel_eqx.save {number}")
    if jax.process_index() == 0:
        for name in os.listdir(folder):
            if _has_parts(name) and name != str(number):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def read(folder: str, number: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays, placed as wanted; a process reads what its devices have."""
    checkpoints = _orbax()
    path = os.path.join(os.path.abspath(folder), str(number))
    try:
        with checkpoints.StandardCheckpointer() as reader:
            return reader.restore(path, dict(wanted))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder!r} is damaged: its parts cannot be read ({str(error).splitlines()[0]}). Use an older checkpoint, or copy the folder again."
        ) from error


def _orbax() -> Any:
    return require("orbax.checkpoint", "A checkpoint in parts", "checkpoints")
