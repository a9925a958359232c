"""Files that others may have put in the way: replaced atomically, read without waiting, locked without following links."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

_DIGITS = 12


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends, and is removed if the block fails.

    Until then it has a name that nobody can know before, and that is not opened if it exists. What `path` names must be a regular file, or
    nothing yet; `OSError` otherwise.
    """
    target = os.path.realpath(path)  # a link stays a link
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(target).st_mode, target)
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(_DIGITS // 2)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(temporary)
        raise
    _sync_directory(directory)


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Removes the temporary files of writers of `path` that were killed. Only for those who hold its lock."""
    directory, name = os.path.split(os.path.realpath(path))
    for entry in os.listdir(directory):
        middle = entry.removeprefix(f".{name}.").removesuffix(".tmp")
        if entry == f".{name}.{middle}.tmp" and len(middle) == _DIGITS:
            with contextlib.suppress(OSError):  # it is in nobody's way
                os.unlink(os.path.join(directory, entry))


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file, cut behind `most` bytes. `OSError` for a pipe or a device, of which reading might never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        _check_regular(os.fstat(file.fileno()).st_mode, os.fspath(path))
        return file.read(most)


def lock_of(path: str | os.PathLike[str]) -> Any:
    """The `filelock.FileLock` of this name, which is not yet held. `OSError` if the name is that of a link, which opening it would follow, or of
    no regular file."""
    import filelock

    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.lstat(path).st_mode, os.fspath(path))
    return filelock.FileLock(path)


def _check_regular(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", path)


def _sync_directory(directory: str) -> None:
    """Make the new name durable, if directories can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
