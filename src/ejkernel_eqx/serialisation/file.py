"""Saving and loading models: a JSON header, then the leaves.

A file consists of:

1. one line of JSON: format, schema, hyperparameters, those of every module in the model, a table of the leaves (path, kind, dtype,
   shape) and, if requested, the tuned configurations of the model's kernels;
2. the leaves as `equinox.tree_serialise_leaves` writes them, so that `equinox.tree_deserialise_leaves` can read the rest of the file
   after its first line. Dtypes that NumPy's format does not support are written as unsigned integers of the same width, and random
   keys as their key data; the table records what they are;
3. a footer of fixed size: a magic number, the number of bytes before it, and their SHA-256.

With the footer, truncated, extended or altered files are detected before anything is built from them. Leaves are written and read
one at a time, so neither needs a second copy of the model in memory.
"""

import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import reprlib
import struct
import tokenize
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes  # noqa: F401  registers bfloat16, float8_*, int4 with NumPy's dtype()
import numpy as np

from .._errors import CheckpointError
from ..dispatch import no_tuning
from ..dispatch.files import replacing
from ..tuning.carried import choices_of_model, with_choices
from . import parts
from .hyperparameters import differences, hyperparameters_of

_LOG = logging.getLogger("ejkernel_eqx")
_FORMAT = "ejkernel_eqx"
_SCHEMA = 1
_PREFIX = f'{{"format": "{_FORMAT}", "schema": '.encode()
_FOOTER = struct.Struct("<8sQ32s")  # magic, bytes before the footer, their SHA-256
_MAGIC = b"EJXEND\r\n"
_CHUNK = 1 << 22
_ARRAYS = ("array", "numpy array", "numpy scalar")
_SCALARS = {"bool": bool, "int": int, "float": float, "complex": complex}
# What NumPy raises for the header of an array that is not one.
_UNREADABLE = (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)
_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxdict, _shown.maxlist, _shown.maxstring, _shown.maxother = 8, 40, 40, 200, 200


class _Leaf(NamedTuple):
    path: str
    kind: str  # one of _ARRAYS, "key", or one of _SCALARS
    dtype: str | None  # for a key: the name of its implementation
    shape: tuple[int, ...] | None

    @property
    def is_part(self) -> bool:
        """Whether a checkpoint that is a folder has the leaf among its parts."""
        return parts.is_stored(self.kind, self.dtype, self.shape)

    def __str__(self) -> str:
        if self.shape is None:
            return f"a Python {self.kind}"
        # Arrays and scalars of NumPy and arrays of JAX can replace each other, so they are described alike.
        noun = "random keys" if self.kind == "key" else "array"
        return f"{noun} {self.dtype}[{','.join(map(str, self.shape))}]"


def save(
    path: str | os.PathLike[str],
    model: Any,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    configs: bool = False,
    sharded: bool = False,
) -> None:
    """Saves `model` to `path` atomically.

    The file is written next to `path` under a temporary name, flushed to disk and then renamed. If this is interrupted, `path` holds
    either the complete old file or the complete new one.

    **Arguments:**

    - `path`: the file; no suffix is added.
    - `model`: any pytree. It saves arrays of any dtype (including bfloat16, float8 and int4), random keys, and Python
        or NumPy scalars. Sharded arrays are gathered one at a time. Everything else, such as static fields and
        functions, comes from `like` when loading. Kernel plans are static fields.
    - `hyperparameters`: the arguments needed to rebuild the model. They must survive a round trip through JSON, in which tuples become
        lists. [`ejkernel_eqx.load`][] passes them to `like` as keyword arguments.
    - `configs`: also save the tuned configurations of the model's kernels (`ejx.tune`, `tune_for=`), with the devices
        that they are valid for. The file carries them to other machines. Configurations given explicitly (`config=`, an
        overlay) are not saved.
    - `sharded`: write a folder instead of a file, for arrays that are split over devices, also those of several
        processes. Each process writes the parts of its devices, by Orbax (the extra `checkpoints`). All processes must
        call `save`, with a path that all of them see. An older checkpoint in the folder stays until the new one is
        complete.

    **Raises:**

    `ValueError` naming the hyperparameter that JSON cannot represent, or the leaf that cannot be saved. Nothing is written then.
    """
    hyperparameters = {} if hyperparameters is None else dict(hyperparameters)
    _check_hyperparameters(hyperparameters)
    described, treedef = _described(model)
    saved = [(leaf, x) for leaf, x in described if leaf is not None]
    for leaf, x in saved:
        _check_savable(leaf, x, sharded and leaf.is_part)
    header = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "hyperparameters": hyperparameters,
        "modules": hyperparameters_of(model),
        "leaves": [{k: v for k, v in leaf._asdict().items() if v is not None} for leaf, _ in saved],
    }
    if configs:
        header["configs"] = choices_of_model(model)
    if not sharded:
        _write_file(path, header, model)
        return
    folder = os.fspath(path)
    number = parts.next_number(folder, lambda: info(folder))
    parts.write(folder, number, {str(n): x for n, (leaf, x) in enumerate(saved) if leaf.is_part})
    if jax.process_index() == 0:
        others = treedef.unflatten(
            [None if leaf is not None and leaf.is_part else x for leaf, x in described]
        )
        _write_file(os.path.join(folder, parts.INDEX), header | {"parts": number}, others)
    parts.finish(folder, number)


def _write_file(path: Any, header: dict[str, Any], model: Any) -> None:
    line = json.dumps(header, allow_nan=False).encode() + b"\n"
    assert line.startswith(_PREFIX)
    with replacing(path) as file:
        writer = _HashingWriter(file)
        writer.write(line)
        eqx.tree_serialise_leaves(writer, model, filter_spec=_write_leaf)
        file.write(_FOOTER.pack(_MAGIC, writer.count, writer.hash.digest()))


def load(
    path: str | os.PathLike[str], like: Any, *, dtype: Any = None, configs: bool = True, strict: bool = True
) -> Any:
    """Loads a model saved by [`ejkernel_eqx.save`][].

    The file provides the leaves, and `like` the structure; nothing is imported by a name in the file. The whole file is checked
    against its checksum before anything is built from it.

    **Arguments:**

    - `path`: the file, or the folder if it was saved with `sharded=True`. All processes must then call `load`; each reads
        the parts of its devices.
    - `like`: a pytree of the same structure, as for `equinox.tree_deserialise_leaves`; or a callable (a class, a function) that builds
        one. The callable receives the saved hyperparameters as keyword arguments and, if it has a parameter `key` that is not among
        them, an arbitrary random key. It runs under `equinox.filter_eval_shape`, so its arrays are never allocated. An instance of an
        `eqx.Module` counts as a pytree even if it is callable.
    - `dtype`: if given, every floating-point array (but not Python floats) is converted to it while loading. Otherwise dtypes must match.
    - `configs`: whether to apply the tuned configurations in the file, if any, on the devices they were tuned for. If the default device
        is another one, a warning says so, and the model behaves as if it had not been tuned. Another warning names configurations that do
        not apply (another version of the kernels, a missing kernel). Kernels built with `config=` are unchanged.
    - `strict`: whether a module of `like` with other hyperparameters than in the file is an error; `False` warns. Compared are the fields
        that say what the weights compute: numbers of heads, causal masks, activations (by name). Fields that say how they are run are
        not (platform, plan, mesh, dtypes, recomputation), and neither is a field that only one side knows.

    **Returns:**

    The model. An array whose counterpart in `like` was placed explicitly, for instance sharded, is placed the same way, on
    whatever devices it was saved from. So is one whose counterpart is a `jax.ShapeDtypeStruct` with a sharding
    ([`ejkernel_eqx.models.place`][] makes them).

    **Raises:**

    `CheckpointError`, a `ValueError` that names the file, if `save` did not write it, it is truncated or altered, it
    comes from a newer version, or it does not fit `like`. In the last case the error names the first leaf or the
    hyperparameters that differ.
    """
    path = os.fspath(path)
    dtype = None if dtype is None else _override(dtype)
    with open(_file_of(path), "rb") as file:
        header, saved = _read_header(file, path)
        start = file.tell()
        end = _verify(file, path)
        if callable(like) and not isinstance(like, eqx.Module):
            like = _build(path, like, header["hyperparameters"])
        described, treedef = _described(like)
        _compare(path, saved, [here for here, _ in described if here is not None], dtype)
        _compare_modules(path, header.get("modules", {}), like, strict)
        file.seek(start)
        table = iter(zip(saved, _read_parts(path, header, saved, [x for here, x in described if here])))
        loaded = []
        for here, x in described:
            if here is None:
                loaded.append(x)
                continue
            leaf, value = next(table)
            value = _read_leaf(file, path, leaf, x) if value is None else value
            loaded.append(_as_wanted(value, leaf, here, x, dtype))
        if file.tell() != end:
            raise _damaged(path, "its leaves do not end where its footer begins")
    model = jtu.tree_unflatten(treedef, loaded)
    if not configs or "configs" not in header:
        return model
    return with_choices(model, header["configs"], repr(path))


def info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the header of a file saved by [`ejkernel_eqx.save`][], without reading the leaves.

    **Arguments:**

    - `path`: the file, or the folder.

    **Returns:**

    A dictionary with the entries `format`, `schema`, `hyperparameters` and `leaves`. The last is a list of dictionaries
    with `path`, `kind` and, for arrays, `dtype` and `shape`. A file of this version or a later one also has `modules`:
    by path, the hyperparameters of every module. A file that was saved with them also has `configs`.

    **Raises:**

    `CheckpointError` naming the file if `save` did not write it, it is truncated, or it comes from a newer version.
    """
    path = os.fspath(path)
    with open(_file_of(path), "rb") as file:
        header, _ = _read_header(file, path)
        _read_footer(file, path)
    return header


def _file_of(path: str) -> str:
    """The file with the header."""
    return os.path.join(path, parts.INDEX) if os.path.isdir(path) else path


# What a leaf is


def _describe(path, x) -> _Leaf | None:
    """The entry of one leaf in the table, or `None` if its kind is not saved."""
    name = jtu.keystr(path)
    if isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        if not isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            # An abstract key has only a dtype. The only public way to the name of its implementation is to make such a key.
            return _Leaf(name, "key", str(jax.random.key_impl(jnp.empty((), x.dtype))), tuple(x.shape))
        # JAX's `issubdtype` supports the extension types of ml_dtypes as well as NumPy's own.
        if not (x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.number)):
            raise ValueError(
                f"The leaf {name!r} is an array of dtype {x.dtype}; only booleans and numbers can be saved. "
                "Make it a static field, or leave it out of the model."
            )
        kind = "numpy array" if isinstance(x, np.ndarray) else "array"
        return _Leaf(name, kind, x.dtype.name, tuple(x.shape))
    if isinstance(x, np.generic):
        return _Leaf(name, "numpy scalar", x.dtype.name, ())
    for kind, scalar in _SCALARS.items():
        if isinstance(x, scalar):
            return _Leaf(name, kind, None, None)
    return None


def _described(tree: Any) -> tuple[list[tuple[_Leaf | None, Any]], Any]:
    """All leaves, each with its entry in the table, and the structure of the tree."""
    found, treedef = jtu.tree_flatten_with_path(tree)
    return [(_describe(path, x), x) for path, x in found], treedef


def _check_savable(leaf: _Leaf, x, sharded: bool) -> None:
    if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise ValueError(
            f"The leaf {leaf.path!r} is a {type(x).__name__}, which holds no values; save a concrete model, "
            "outside jit and eval_shape."
        )
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not sharded:
        raise ValueError(
            f"The leaf {leaf.path!r} is sharded over several processes; save the model from all of them with sharded=True."
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(f"The leaf {leaf.path!r} has been deleted (donated to a jitted function, perhaps).")
    if leaf.kind == "int" and not -(2**63) <= x < 2**63:
        raise ValueError(f"The leaf {leaf.path!r} is the integer {x}, which does not fit 64 bits.")


# Writing


def _write_leaf(file, x) -> None:
    """Equinox's default, except for dtypes that it cannot read back."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        np.save(file, np.asarray(jax.random.key_data(x)))
    elif isinstance(x, jax.Array | np.ndarray):
        x = np.asarray(x)
        x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        np.save(file, x.view(_stored_dtype(x.dtype)))
    elif isinstance(x, np.generic):
        _write_leaf(file, np.asarray(x))
    else:
        eqx.default_serialise_filter_spec(file, x)


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that arrays of a dtype have in the file."""
    if np.dtype(dtype.name).isbuiltin == 1:
        return dtype
    # Equinox and JAX read bfloat16 back from two opaque bytes.
    return np.dtype("V2") if dtype.name == "bfloat16" else np.dtype(f"u{dtype.itemsize}")


class _HashingWriter:
    """Counts and hashes the bytes written to the file."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.hash = hashlib.sha256()
        self.count = 0

    def write(self, data) -> int:
        self._file.write(data)
        self.hash.update(data)
        self.count += memoryview(data).nbytes
        return memoryview(data).nbytes


def _check_hyperparameters(hyperparameters: Mapping[str, Any]) -> None:
    for key, value in hyperparameters.items():
        if not isinstance(key, str):
            raise ValueError(
                f"hyperparameters: expected strings as keys, received {key!r} ({type(key).__name__})."
            )
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == _lists(value)
            reason = "loading would return something else (are all keys of dictionaries strings?)"
        except (TypeError, ValueError, RecursionError) as error:
            same, reason = False, str(error)
        if not same:
            raise ValueError(
                f"hyperparameters[{key!r}] cannot be stored as JSON: {reason}. Received {value!r} "
                f"({type(value).__name__}); store numbers, strings, booleans, None, lists and dictionaries, for "
                "example a dtype by its name."
            )


def _lists(value):
    if isinstance(value, list | tuple):
        return [_lists(v) for v in value]
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return value


# Reading


def _damaged(path: str, how: str) -> CheckpointError:
    return CheckpointError(f"{path!r} is damaged: {how}. Use an older checkpoint, or copy the file again.")


def _read_header(file: BinaryIO, path: str) -> tuple[dict[str, Any], list[_Leaf]]:
    """The header, and its table of leaves."""
    start = file.read(len(_PREFIX))
    if start != _PREFIX:
        if _PREFIX.startswith(start):
            raise CheckpointError(f"{path!r} is truncated: it ends after {len(start)} bytes.")
        hint = ""
        if start.startswith(b"\x93NUMPY"):
            hint = " equinox.tree_serialise_leaves seems to have written it: read it with tree_deserialise_leaves."
        raise CheckpointError(f"{path!r} is not a checkpoint written by ejkernel_eqx.save.{hint}")
    line = start + file.readline()
    if not line.endswith(b"\n"):
        raise CheckpointError(f"{path!r} is truncated: it ends within its header, after {len(line)} bytes.")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    schema = header.get("schema")
    if type(schema) is not int or schema < 1:
        raise _damaged(path, f"its schema is {_shown.repr(schema)}")
    if schema > _SCHEMA:
        raise CheckpointError(
            f"{path!r} has schema {schema}, but this version of ejkernel_eqx reads up to {_SCHEMA}. "
            "Update ejkernel_eqx to load it."
        )
    for name, kind in (("hyperparameters", dict), ("modules", dict), ("leaves", list)):
        if not isinstance(header.get(name, {} if name == "modules" else None), kind):
            raise _damaged(path, f"its header has no {name}")
    try:
        return header, [_leaf_of(entry) for entry in header["leaves"]]
    except (TypeError, ValueError) as error:
        raise _damaged(path, f"its table of leaves has an entry that is none ({error})") from error


def _leaf_of(entry: Any) -> _Leaf:
    """An entry of the table of leaves; `TypeError` or `ValueError` for anything else."""
    leaf = _Leaf(**{"dtype": None, "shape": None, **entry})
    if not isinstance(leaf.path, str) or leaf.kind not in (*_ARRAYS, "key", *_SCALARS):
        raise ValueError(f"received {_shown.repr(entry)}")
    if leaf.kind in _SCALARS:
        return leaf._replace(dtype=None, shape=None)
    sizes = leaf.shape if isinstance(leaf.shape, list) else (None,)
    if not isinstance(leaf.dtype, str) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"received {_shown.repr(entry)}")
    if leaf.kind != "key":
        dtype = jnp.dtype(leaf.dtype)
        if dtype.name != leaf.dtype or not (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)):
            raise ValueError(f"the dtype {leaf.dtype!r} is not one of arrays that can be saved")
    return leaf._replace(shape=tuple(sizes))


def _read_footer(file: BinaryIO, path: str) -> tuple[int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if size >= _FOOTER.size:
        file.seek(size - _FOOTER.size)
        magic, count, digest = _FOOTER.unpack(file.read(_FOOTER.size))
        if magic == _MAGIC and count == size - _FOOTER.size:
            return count, digest
    raise CheckpointError(
        f"{path!r} is truncated or something was appended to it: it does not end with the footer of a complete "
        "checkpoint. Use an older checkpoint, or copy the file again."
    )


def _verify(file: BinaryIO, path: str) -> int:
    """Compares the file with its checksum. Returns where its footer begins."""
    end, expected = _read_footer(file, path)
    left, digest = end, hashlib.sha256()
    file.seek(0)
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise CheckpointError(f"{path!r} was truncated while it was being read.")
        digest.update(chunk)
        left -= len(chunk)
    if digest.digest() != expected:
        raise _damaged(path, "its contents do not match their checksum")
    return end


def _build(path: str, make: Callable[..., Any], hyperparameters: Mapping[str, Any]):
    name = getattr(make, "__qualname__", repr(make))
    needs_key = False
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some callables written in C have none
        pass
    else:
        key = signature.parameters.get("key")
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needs_key = key is not None and key.kind in by_name and "key" not in hyperparameters
        try:
            signature.bind(**hyperparameters, **({"key": None} if needs_key else {}))
        except TypeError as error:
            raise CheckpointError(
                f"{path!r} was saved with the hyperparameters {_shown.repr(hyperparameters)}, which do not fit "
                f"`like={name}`: {error}. Pass a `like` that accepts them, or a model instead of a callable."
            ) from error

    def build():
        return make(**hyperparameters, **({"key": jax.random.key(0)} if needs_key else {}))

    with no_tuning():  # loading a model must not tune it
        return eqx.filter_eval_shape(build)


def _override(dtype) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"dtype: expected a floating-point dtype, received {dtype.name}; only floating-point leaves are converted."
        )
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype: expected 64-bit types to be enabled for float64; set jax_enable_x64, or pass another dtype."
        )
    return dtype


_BUILD = (
    "Build `like` with the hyperparameters of the saved model; ejkernel_eqx.serialisation.info(path) shows them and "
    "the leaves."
)


def _compare(path: str, saved: list[_Leaf], expected: list[_Leaf], dtype: np.dtype | None) -> None:
    """Raises for the first leaf that differs between the file and `like`."""

    def differ(problem: str, remedy: str = _BUILD) -> CheckpointError:
        return CheckpointError(f"{path!r} does not fit `like`: {problem}. {remedy}")

    here, there = ({leaf.path for leaf in leaves} for leaves in (saved, expected))
    for old, new in itertools.zip_longest(saved, expected):
        if new is not None and new.path not in here:
            raise differ(f"`like` has {new.path!r} ({new}), which is not in the file")
        if old is not None and old.path not in there:
            raise differ(f"the file has {old.path!r} ({old}), which is not in `like`")
        if old is None or new is None:
            raise differ(f"the file has {len(saved)} leaves, `like` has {len(expected)}")
        if old.path != new.path:
            raise differ(f"the file has {old.path!r} where `like` has {new.path!r}")
        floats = old.shape == new.shape and _is_floating(old) and _is_floating(new)
        if str(old) != str(new) and not (floats and dtype is not None):
            convert = f"Pass dtype={new.dtype!r} to convert the floating-point leaves, or change `like`."
            raise differ(f"{old.path!r}: expected {new}, received {old}", convert if floats else _BUILD)


def _compare_modules(path: str, saved: dict[str, Any], like: Any, strict: bool) -> None:
    """Raises, or warns, if modules of `like` have other hyperparameters than in the file."""
    different = [
        f"{name}: expected {_shown.repr(expected)}, received {_shown.repr(received)}"
        for place, fields in hyperparameters_of(like).items()
        for name, expected, received in differences(place, fields, saved.get(place, {}))
    ]
    if not different:
        return
    problem = f"{path!r} does not fit `like`: {different[0]}"
    problem += f", and {len(different) - 1} more hyperparameters differ" if len(different) > 1 else ""
    if strict:
        raise CheckpointError(f"{problem}. {_BUILD} strict=False loads it all the same.")
    _LOG.warning("%s. It is loaded all the same (strict=False).", problem)


def _is_floating(leaf: _Leaf) -> bool:
    return leaf.kind in _ARRAYS and jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)


def _read_array(
    file: BinaryIO, path: str, leaf: _Leaf, shape: tuple[int, ...], *dtypes: np.dtype
) -> np.ndarray:
    """Reads an array, whose own header is compared with the table before memory is allocated for it."""
    start = file.tell()
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        stored, _, kind = read(file)
        if stored != shape or kind not in dtypes:
            raise ValueError(f"its array is {kind}{list(stored)}, its table says {dtypes[0]}{list(shape)}")
        if math.prod(shape) * kind.itemsize > os.fstat(file.fileno()).st_size - file.tell():
            raise ValueError("the file is shorter than its array")
        file.seek(start)
        return np.lib.format.read_array(file, allow_pickle=False)
    except _UNREADABLE as error:
        raise _damaged(path, f"the leaf {leaf.path!r} cannot be read ({error})") from error


def _read_parts(path: str, header: dict[str, Any], saved: list[_Leaf], like: list[Any]) -> list[Any]:
    """For each leaf the array, if it is one of the parts of a folder; else `None`."""
    if not os.path.isdir(path):
        return [None] * len(saved)
    own = jnp.zeros(()).sharding  # of arrays that nobody has placed
    wanted = {
        str(n): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding_of(x) or own)
        for n, (leaf, x) in enumerate(zip(saved, like))
        if leaf.is_part
    }
    found = parts.read(path, parts.number_in(path, header), wanted)
    return [found.get(str(n)) for n in range(len(saved))]


def _read_leaf(file: BinaryIO, path: str, leaf: _Leaf, x) -> Any:
    """Reads a leaf, with the type of its counterpart `x`."""
    if leaf.shape is None:
        scalar = np.asarray(_SCALARS[leaf.kind]())
        return type(x)(_read_array(file, path, leaf, (), scalar.dtype).item())
    if leaf.kind == "key":
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, x.dtype))
        value = _read_array(file, path, leaf, data.shape, np.dtype(data.dtype))
        return jax.random.wrap_key_data(jnp.asarray(value), impl=leaf.dtype)
    stored = jnp.dtype(leaf.dtype)
    dtypes = [_stored_dtype(stored)]
    if stored.itemsize <= 8:  # as earlier versions wrote arrays of a foreign byte order
        dtypes.append(np.dtype(f"u{stored.itemsize}"))
    return _read_array(file, path, leaf, leaf.shape, *dtypes).view(stored)


def _as_wanted(value: Any, leaf: _Leaf, here: _Leaf, x: Any, dtype: np.dtype | None) -> Any:
    """A leaf that was read, with the dtype and placement of its counterpart `x`."""
    if leaf.shape is None:
        return value
    if leaf.kind == "key":
        return _place(value, x)
    if dtype is not None and _is_floating(leaf):
        value = value.astype(dtype)
    # Under `filter_eval_shape`, all kinds of arrays look the same, so the file decides.
    kind = leaf.kind if isinstance(x, jax.ShapeDtypeStruct) else here.kind
    if kind == "array":
        return _place(value, x)
    value = np.asarray(value)
    return value[()] if kind == "numpy scalar" else value


def _sharding_of(x: Any) -> Any:
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False) else None


def _place(value, x) -> jax.Array:
    return jax.device_put(value, _sharding_of(x))
