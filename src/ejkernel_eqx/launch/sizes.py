"""Sizes of tiles and grids, and which tiles fit in a device's shared memory or vector memory."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from ..dispatch import DeviceFacts

T = TypeVar("T")
_LEAST_SHARED = 49_152  # bytes, for a device that does not report its size


def cdiv(length: int, block: int) -> int:
    """The number of blocks that cover a length."""
    return -(-length // block)


def padded(size: int, least: int = 16) -> int:
    """The smallest power of two from `least` on that holds `size`; the default is for channels of a tile in products."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def shared_memory_of(device: DeviceFacts) -> int:
    """The shared memory available to a program, in bytes."""
    return device.shared_memory or _LEAST_SHARED


def fitting(tiles: Iterable[T], needed: Callable[[T], int], device: DeviceFacts) -> list[T]:
    """The tiles that fit in the device's shared memory."""
    return [tile for tile in tiles if needed(tile) <= shared_memory_of(device)]


def too_large(kernel: str, sizes: str, stages: int, needed: int, device: DeviceFacts) -> str | None:
    """The reason why tiles of these sizes do not fit, by an estimate of the bytes they need."""
    limit = shared_memory_of(device)
    if needed <= limit:
        return None
    return f"{kernel} with {sizes} tiles and {stages} stages takes about {needed} bytes of shared memory, the device has {limit}"


@functools.cache
def numbers_of(rows: str) -> tuple[tuple[int, ...], ...]:
    """Rows of numbers, written as `"16 32 4, 32 32 8"`: the fields of tiles in order."""
    return tuple(tuple(map(int, row.split())) for row in rows.split(","))


def rows_of(columns: list[list[T]]) -> list[tuple[T, ...]]:
    """The first of every column, the second of every column, ...; short columns stay at their last."""
    return [
        tuple(column[min(row, len(column) - 1)] for column in columns)
        for row in range(max(map(len, columns)))
    ]


def tile_bytes(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array in a TPU's VMEM, where its last two axes are padded to tiles of 128 numbers by 8 words."""
    size = jnp.dtype(dtype).itemsize
    *others, rows, columns = (1, 1, *shape)
    return math.prod(others) * size * (-(-rows // (32 // size)) * (32 // size)) * (-(-columns // 128) * 128)


def too_large_for_vmem(kernel: str, sizes: str, needed: int, device: DeviceFacts) -> str | None:
    """The reason why blocks of these sizes do not fit a TPU core, by an estimate of the bytes they need. The host of an interpreter has no limit."""
    limit = device.vmem * 9 // 10  # the compiler needs some itself
    if not device.vmem or needed <= limit:
        return None
    return f"{kernel} with {sizes} tiles takes about {needed} bytes of VMEM, of which the device has {device.vmem}"
