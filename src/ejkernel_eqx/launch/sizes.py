"""Sizes of tiles and grids, and which tiles fit in a device's shared memory."""

from collections.abc import Callable, Iterable
from typing import TypeVar

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
    """Why tiles of these sizes do not fit, by an estimate of the bytes they need."""
    limit = shared_memory_of(device)
    if needed <= limit:
        return None
    return f"{kernel} with {sizes} tiles and {stages} stages takes about {needed} bytes of shared memory, the device has {limit}"


def rows_of(columns: list[list[T]]) -> list[tuple[T, ...]]:
    """The first of every column, the second of every column, ...; short columns stay at their last."""
    return [
        tuple(column[min(row, len(column) - 1)] for column in columns)
        for row in range(max(map(len, columns)))
    ]
