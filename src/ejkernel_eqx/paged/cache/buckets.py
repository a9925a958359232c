"""The sizes that batches are padded to."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from ...sequences.packing import read_count


class BucketSizes(NamedTuple):
    """The sizes of one padded batch."""

    tokens: int
    sequences: int
    pages: int
    query_len: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes that batches are padded to: each combination compiles once, whatever the batches that pass through it.

    **Arguments:** ascending sizes `>= 1`, tuples of ints:

    - `tokens`: of the packed tokens of all sequences, `T`.
    - `sequences`: `N`.
    - `pages`: of the longest sequence, `M`.
    - `query_len`: of the new tokens of one sequence; the kernels choose by it, so have a 1 for decoding.

    **Raises:** `ValueError` for anything else.
    """

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    pages: tuple[int, ...]
    query_len: tuple[int, ...]

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            several = isinstance(given, Iterable) and not isinstance(given, str)
            sizes = tuple(read_count(field.name, size, least=1) for size in given) if several else ()
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(
                    f"{field.name}: expected ascending sizes such as (1, 2, 4), received {given!r}; one size alone is a tuple too."
                )
            object.__setattr__(self, field.name, sizes)

    @classmethod
    def powers_of_two(
        cls, max_tokens: int, max_sequences: int, max_pages: int, max_query_len: int | None = None
    ) -> "Buckets":
        """1, 2, 4 and so on up to each largest size, which is the last of them whether a power or not.

        **Arguments:** the largest number of packed tokens, of sequences, of pages a sequence, and of new tokens a sequence
        (by default `max_tokens`).

        **Raises:** `ValueError` for a size below 1.
        """
        largest = {"max_tokens": max_tokens, "max_sequences": max_sequences, "max_pages": max_pages}
        largest["max_query_len"] = max_tokens if max_query_len is None else max_query_len
        return cls(*(_powers(read_count(name, size, least=1)) for name, size in largest.items()))

    def pick(self, tokens: int, sequences: int, pages: int, query_len: int) -> BucketSizes:
        """The smallest sizes that hold these.

        **Raises:** `ValueError`, which names the size that is too large for every bucket.
        """
        wanted = BucketSizes(tokens, sequences, pages, query_len)
        found = []
        for name, size in wanted._asdict().items():
            sizes = getattr(self, name)
            size = read_count(name, size)
            fitting = [bucket for bucket in sizes if bucket >= size]
            if not fitting:
                raise ValueError(
                    f"{name}: expected at most {sizes[-1]}, the largest bucket, received {size}; split the batch or add a bucket to "
                    f"Buckets.{name}."
                )
            found.append(fitting[0])
        return BucketSizes(*found)


def _powers(largest: int) -> tuple[int, ...]:
    return (*(2**n for n in range((largest - 1).bit_length())), largest)
