"""Atomic replacement of files."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], suffix: str | None = None) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends, and is removed if the block fails.

    Until then its name is `path` with `suffix`, for writers that hold a lock; leftovers of a killed process are overwritten. Without a
    suffix every writer uses a unique name.
    """
    target = os.path.realpath(path)  # a link stays a link
    directory, name = os.path.split(target)
    own = f".{name}.{secrets.token_hex(6)}.tmp"
    temporary = os.path.join(directory, own if suffix is None else f"{name}{suffix}")
    try:
        with open(temporary, "xb" if suffix is None else "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(temporary)
        raise
    _sync_directory(directory)


def _sync_directory(directory: str) -> None:
    """Make the new name durable, if directories can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
