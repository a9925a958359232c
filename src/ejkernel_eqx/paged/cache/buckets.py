"""The sizes to which batches are padded."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from ..._signatures import explained_options
from ...sequences.packing import read_count


class BucketSizes(NamedTuple):
    """The sizes of a padded batch."""

    tokens: int
    sequences: int
    pages: int
    query_len: int


@explained_options
@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes to which batches are padded. Each combination of sizes is compiled once and serves every batch that it holds.

    **Arguments:** tuples of ascending ints `>= 1`:

    - `tokens`: the number of packed tokens of all sequences, `T`.
    - `sequences`: the number of sequences, `N`.
    - `pages`: the number of pages of the longest sequence, `M`.
    - `query_len`: the number of new tokens per sequence. Kernels are chosen by it, so include 1 for decoding.

    **Raises:** `ValueError` for anything else.
    """

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    pages: tuple[int, ...]
    query_len: tuple[int, ...]

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            # A string would be read by its characters, with a message about a single one.
            several = isinstance(given, Iterable) and not isinstance(given, str)
            sizes = tuple(read_count(field.name, size, least=1) for size in given) if several else ()
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(
                    f"{field.name}: expected a tuple of ascending sizes such as (1, 2, 4), received {given!r}; pass a single size as a tuple too."
                )
            # The dataclass is frozen, so only this call can store the normalised tuple.
            object.__setattr__(self, field.name, sizes)

    @classmethod
    def powers_of_two(
        cls, max_tokens: int, max_sequences: int, max_pages: int, max_query_len: int | None = None
    ) -> "Buckets":
        """Buckets of 1, 2, 4 and so on up to each maximum, which is always included.

        **Arguments:** the maximum number of packed tokens, of sequences, of pages per sequence, and of new tokens per sequence
        (by default `max_tokens`).

        **Raises:** `ValueError` for a size below 1.
        """
        largest = {"max_tokens": max_tokens, "max_sequences": max_sequences, "max_pages": max_pages}
        largest["max_query_len"] = max_tokens if max_query_len is None else max_query_len
        return cls(*(_powers(read_count(name, size, least=1)) for name, size in largest.items()))

    def pick(self, tokens: int, sequences: int, pages: int, query_len: int) -> BucketSizes:
        """The smallest buckets that hold these sizes.

        **Raises:** `ValueError` naming the size that exceeds every bucket.
        """
        wanted = BucketSizes(tokens, sequences, pages, query_len)
        for name, size in wanted._asdict().items():
            sizes, size = getattr(self, name), read_count(name, size)
            if size > sizes[-1]:
                raise ValueError(
                    f"{name}: expected at most {sizes[-1]}, the largest bucket, received {size}; split the batch or add a bucket to "
                    f"Buckets.{name}."
                )
            wanted = wanted._replace(**{name: next(bucket for bucket in sizes if bucket >= size)})
        return wanted


def _powers(largest: int) -> tuple[int, ...]:
    # The powers stay below the largest size, so that it comes last and only once.
    return (*(2**n for n in range((largest - 1).bit_length())), largest)
