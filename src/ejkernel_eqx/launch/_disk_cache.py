"""Triton's cache on disk where it can be used, and compilation without it where it cannot: a launch must not fail for want of a folder."""

import contextlib
import functools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ._while_used import WhileUsed

_LOG = logging.getLogger("ejkernel_eqx")
# A folder that cannot be written, entries of which a crash left a part, and JSON that is not what Triton expects. What Triton says of a kernel that
# does not compile is none of these.
_UNUSABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
_SIZES = {"ptx": ("num_warps", "shared", "global_scratch_size", "profile_scratch_size", "tmem_size")}
_warned: set[str] = set()
"""Folders."""


def _enabled(changes: contextlib.ExitStack) -> None:
    from triton import knobs

    if not knobs.cache.dir:  # jax-triton 0.3 disables the cache with an empty name
        changes.enter_context(knobs.cache.scope())
        knobs.cache.dir = os.path.join(knobs.cache.home_dir, ".triton", "cache")


def _temporary(changes: contextlib.ExitStack) -> None:
    from triton import knobs

    folder = _temporary_folder().name
    changes.enter_context(knobs.cache.scope())
    changes.enter_context(knobs.compilation.scope())
    knobs.cache.dir = folder
    knobs.compilation.store_binary_only = False


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ejkernel_eqx_triton_")


_enabled_cache, _temporary_cache = WhileUsed(_enabled), WhileUsed(_temporary)
_identified = threading.Lock()


def identify_triton() -> None:
    """Triton's keys contain a digest of its own files, half a gigabyte to read. It is kept, but without this each thread that compiles while there is
    none would make one."""
    from triton.runtime import cache

    key: Callable[[], Any] | None = getattr(cache, "triton_key", None)  # it is Triton's own
    with _identified:
        if key is not None:
            key()


def through_cache(compiling: Callable[[], Any], text: str) -> Any:
    """Returns what `compiling` makes or finds in the cache. If the cache cannot be used, or its entry lacks the `text` (`"ptx"`, `"amdgcn"`), it
    compiles once more, in a folder of this process."""
    from triton import knobs

    identify_triton()
    with _enabled_cache:
        folder = knobs.cache.dir
        try:
            found = compiling()
            if _is_whole(found, text):
                return found
            problem = f"an entry has no whole {text}, or one that is not described"
        except _UNUSABLE as error:
            problem = f"{type(error).__name__}: {error}"
        with _temporary_cache:
            found = compiling()
    _warn_once(folder, problem)
    return found


def _is_whole(found: Any, text: str) -> bool:
    """Returns whether the text ends, and the description beside it is of this text, as far as it shows."""
    about, body = found.metadata, found.asm.get(text, "")
    sizes = [getattr(about, name) for name in _SIZES.get(text, ("num_warps", "shared"))]
    if not isinstance(about.name, str) or not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
        return False
    if text != "ptx":
        return about.name in body
    threads = re.search(r"^\s*\.reqntid (\d+)", body, re.MULTILINE)
    same = threads is None or int(threads[1]) == 32 * about.num_warps
    return same and f".entry {about.name}(" in body and body.rstrip().endswith("}")


def _warn_once(folder: str, problem: str) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    _LOG.warning(
        "Triton's cache in %s cannot be used (%s), so kernels are compiled for this process alone. Make the folder writable, delete it if it is "
        "damaged, or name another one in TRITON_CACHE_DIR.",
        folder,
        problem,
    )
