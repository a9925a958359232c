"""Sources of published arrays: dictionaries, and safetensors files, which are read one array at a time."""

import abc
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, by which safetensors names it
import numpy as np
import safetensors

from .._entries import shown
from .._errors import CheckpointError

StateDict = Mapping[str, Any] | str | os.PathLike[str]
_MOST_BYTES = 2**28
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Source(abc.ABC):
    """Published arrays by name."""

    label: str
    """How messages call it."""
    kept: Collection[str] = ()
    """The names of weights that stay quantised, for `read_kept`."""

    @abc.abstractmethod
    def names(self) -> Iterable[str]:
        raise NotImplementedError

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    @abc.abstractmethod
    def read(self, name: str) -> jax.Array | np.ndarray:
        """The array as floats. A quantised weight becomes floats."""
        raise NotImplementedError

    def read_kept(self, name: str, dtype: Any) -> Any:
        """The `QuantizedWeight` of a name in `kept`, with NumPy arrays. `dtype` is the dtype of the floats that it represents."""
        raise NotImplementedError


class ArraySource(Source):
    """A mapping of arrays of NumPy, JAX or PyTorch."""

    def __init__(self, arrays: Mapping[str, Any]):
        wrong = [name for name in arrays if not isinstance(name, str)]
        if wrong:
            raise ValueError(
                f"state_dict: expected names as keys, received {wrong[0]!r}; a PyTorch model's state_dict() has them."
            )
        self.label, self._arrays = "the given arrays", arrays

    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._arrays[name]
        if not hasattr(found, "shape"):
            raise ValueError(
                f"state_dict[{name!r}]: expected an array of NumPy, JAX or PyTorch, received {type(found).__name__}; convert it first."
            )
        return tuple(int(size) for size in found.shape)

    def read(self, name: str) -> jax.Array | np.ndarray:
        self.shape(name)
        found = self._arrays[name]
        if isinstance(found, jax.Array):
            return found
        return _from_torch(found) if hasattr(found, "detach") else np.asarray(found)


def _from_torch(tensor: Any) -> np.ndarray:
    host = tensor.detach().cpu()
    try:
        return host.numpy()
    except TypeError:  # bfloat16 and float8, which NumPy does not have and float32 holds
        return host.float().numpy()


class FileSource(Source):
    """Safetensors files, opened when something is read from them."""

    def __init__(self, label: str, files: Mapping[str, pathlib.Path]):
        """`files` has the file of each array. Each file is opened once."""
        self.label, self._files = label, files
        self.folder = next((path.parent for path in files.values()), pathlib.Path())
        self._opened: dict[pathlib.Path, Any] = {}
        self._headers: dict[pathlib.Path, tuple[int, Any]] = {}

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        path, kind = self._files[name], self.kind(name)
        # BF16 does not begin with F. The rest are floats of 8 bits and less.
        if kind[0] == "F" and kind not in ("F64", "F32", "F16"):
            raise CheckpointError(
                f"{str(path)!r} holds {name!r} as {kind}: numbers of 8 bits and less have scales of their own, which are not applied here. "
                "Convert the checkpoint to bfloat16 first."
            )
        try:
            return self._open(path).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise _damaged(path, error) from error

    def kind(self, name: str) -> str:
        """The dtype, by its name in safetensors."""
        return self._slice(name).get_dtype()

    def bits(self, name: str) -> np.ndarray:
        """Integers unchanged, floats as unsigned integers with their bits."""
        kind, path = self.kind(name), self._files[name]
        if not kind.startswith("F8"):
            found = self.read(name)
            return found if found.dtype.kind in "iu" else found.view(f"u{found.dtype.itemsize}")
        # NumPy has no such dtypes, so safetensors cannot read them for NumPy. It has checked the header, and the bytes are read here.
        with path.open("rb") as file:
            if path not in self._headers:
                size = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + size, json.loads(file.read(size))
            start, header = self._headers[path]
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            return np.fromfile(file, np.uint8, end - begin).reshape(self.shape(name))

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        try:
            return self._open(path).get_slice(name)
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{self.label} says that {name!r} is in {str(path)!r}, which does not hold it. Download the folder again."
            ) from error

    def _open(self, path: pathlib.Path) -> Any:
        if path not in self._opened:
            self._opened[path] = open_file(path)
        return self._opened[path]


def open_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is not there. Download all files of the model, or correct the path."
        )
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is not a safetensors file, or is cut or damaged ({error}). Download it again; other formats have to be converted to "
        "safetensors first."
    )


def open_source(state_dict: Any) -> Source:
    """Opens a mapping of arrays, a `.safetensors` file, an index of several, or a folder with either."""
    if isinstance(state_dict, Mapping):
        return ArraySource(state_dict)
    if not isinstance(state_dict, str | os.PathLike):
        raise ValueError(
            "state_dict: expected a dictionary of arrays or the path of a safetensors file or folder, received "
            f"{type(state_dict).__name__}; a PyTorch model gives its own by model.state_dict()."
        )
    path = pathlib.Path(state_dict).expanduser()
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == ".json":
        return _sharded(path)
    names = open_file(path).keys()
    return FileSource(repr(str(path)), dict.fromkeys(names, path))


def _in_folder(folder: pathlib.Path) -> pathlib.Path:
    """The file or index of a folder that has all weights."""
    # The standard names come first: a folder may also have other weights.
    for name in (_SINGLE, _INDEX):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        held = ", ".join(path.name for path in found[:4]) or "none"
        raise CheckpointError(
            f"{str(folder)!r}: expected {_SINGLE}, {_INDEX} or one file *.safetensors, found {held}. Name the file itself; "
            "other formats have to be converted to safetensors first."
        )
    return found[0]


def read_json(path: pathlib.Path, most_bytes: int) -> Any:
    """The content of a JSON file. A larger file than allowed is not read."""
    try:
        # The size is checked before reading, so that a wrong path cannot fill the memory.
        if path.stat().st_size > most_bytes:
            raise CheckpointError(
                f"{str(path)!r}: expected a file of at most {most_bytes:,} bytes, received {path.stat().st_size:,}; it is none of a published model. "
                "Download it again."
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # `CheckpointError` is a `ValueError` itself, and its own message says more.
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{str(path)!r} is not readable as JSON ({error}). Download it again."
        ) from error


def of_file(path: pathlib.Path, read: Callable[[Any], Any], content: Any) -> Any:
    """Calls a function that reads a file. Its errors then name the file."""
    try:
        return read(content)
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r}: {error}") from None


def _sharded(index: pathlib.Path) -> Source:
    if not index.is_file():
        raise CheckpointError(f"{str(index)!r} is not there. Correct the path.")
    table = read_json(index, _MOST_BYTES)
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict):
        raise CheckpointError(
            f"{str(index)!r} is not the index of a sharded safetensors checkpoint: it has no table 'weight_map' of names and files. Download it "
            "again."
        )
    # An index is not trusted: its entries must not name files outside of its folder.
    for name, file in files.items():
        if not _is_beside(file):
            raise CheckpointError(
                f"{str(index)!r}: weight_map[{shown(name)}]: expected the name of a file in the same folder, received {shown(file)}; do not use this "
                "index, which points elsewhere."
            )
    return FileSource(repr(str(index)), {name: index.parent / file for name, file in files.items()})


def _is_beside(file: Any) -> bool:
    """Returns whether this is a bare file name on every system. Links are followed, since caches of downloads consist of links."""
    is_name = isinstance(file, str) and 0 < len(file) <= 255 and "\0" not in file
    # Windows paths have both separators and drives, so a test of them is the stricter one.
    return is_name and file != ".." and pathlib.PureWindowsPath(file).name == file
