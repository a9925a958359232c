"""The allocator of a paged cache, on the host: tracks which pages belong to which sequence."""

import array
import dataclasses
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from ..._errors import EjkernelError
from ..._signatures import explained_options
from ...sequences.packing import read_count
from .pages import check_room


class OutOfPagesError(EjkernelError):
    """Too few pages are free for an allocation. Nothing was allocated.

    `sequence` is the sequence to allocate for, `wanted` the number of pages it needs, and `free` the number of free pages.
    """

    sequence: Hashable
    wanted: int
    free: int

    def __init__(self, sequence: Hashable, wanted: int, free: int):
        self.sequence, self.wanted, self.free = sequence, wanted, free
        # The arguments, not the message, so that the exception survives pickling between processes.
        super().__init__(sequence, wanted, free)

    def __str__(self) -> str:
        return (
            f"num_pages: expected {self.wanted} free pages for sequence {self.sequence!r}, found {self.free}; free a sequence or the "
            "pages behind its window (free_behind), postpone this one, or build the cache and its PageTable with more pages."
        )


class PageCopy(NamedTuple):
    """A request to copy page `source` to page `target`."""

    source: int
    target: int


@dataclasses.dataclass
class _Sequence:
    pages: array.array  # int32, one for every p tokens; -1 if freed
    length: int = 0
    freed: int = 0  # the number of leading pages that are -1
    look_back: int | None = None
    """The most keys before its own that a query sees, according to calls of `free_behind`."""


@explained_options
class PageTable:
    r"""Allocates the pages of a cache to sequences as they grow, shares them between forks, and frees them.

    Token $j$ of a sequence is stored at slot $\text{page}_{\lfloor j / p \rfloor} \cdot p + j \bmod p$. Several sequences may share a
    page (`fork`). Before one of them writes into it, that sequence receives its own copy, which `allocate` requests (copy-on-write; Kwon
    et al., 2023, arXiv:2309.06180, section 4.4). The table lives on the host and holds no JAX arrays.

    ```python
    table = PageTable(num_pages=1024, page_size=16)
    copies = table.allocate("request 7", 100)  # room for 100 tokens, now its length
    slots = table.slots("request 7", 0, 100)
    ```

    **Arguments:**

    - `num_pages`, `page_size`: those of the cache.
    - `max_pages`: the maximum number of pages per sequence, and so the width of its row; by default rows are as wide as needed.
    - `window`: the largest number of keys that a query sees in any layer, including its own; by default all. `free_behind` never frees
        keys within the window, and `truncate` and `fork` keep sequences long enough that no query sees freed keys.

    **Raises:** `ValueError` for numbers below 1, or more than 2**30 tokens in all pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_pages: int | None = None, window: int | None = None
    ):
        self.num_pages = read_count("num_pages", num_pages, least=1)
        self.page_size = read_count("page_size", page_size, least=1)
        check_room(self.num_pages, self.page_size)
        self.max_pages = None if max_pages is None else read_count("max_pages", max_pages, least=1)
        self.window = None if window is None else read_count("window", window, least=1)
        # Reversed, because pages are taken from the end: the lowest numbers go first.
        self._free = list(range(self.num_pages))[::-1]
        self._users = [0] * self.num_pages
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """The number of pages that belong to no sequence."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """The number of pages that belong to at least one sequence."""
        return self.num_pages - len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Every sequence, in the order of their creation."""
        return tuple(self._sequences)

    def length(self, sequence: Hashable) -> int:
        """The number of tokens in the sequence, including those in pages freed by `free_behind`.

        **Raises:** `ValueError` for an unknown sequence, as does every method except `allocate`.
        """
        return self._known(sequence).length

    def allocate(self, sequence: Hashable, num_tokens: int) -> list[PageCopy]:
        """Allocates pages for `num_tokens` more tokens and adds them to the sequence's length. On an error, the table is unchanged.

        A new sequence is created if `sequence` is unknown.

        **Returns:** pages to copy before anything is written (`cache.copy_pages`): none, or the partial last page if it is shared. Copy
        after every call, or together for several calls if nothing was freed or forked between them.

        **Raises:** [`ejkernel_eqx.paged.cache.allocator.OutOfPagesError`][] if too few pages are free; `ValueError` for a negative
        number, or more than `max_pages`.
        """
        count = read_count("num_tokens", num_tokens)
        own = self._sequences.get(sequence)
        own = _Sequence(array.array("i")) if own is None else own
        length = own.length + count
        pages = self._pages_of(length)
        if self.max_pages is not None and pages > self.max_pages:
            raise ValueError(
                f"num_tokens: expected at most {self.max_pages * self.page_size - own.length} more tokens for sequence {sequence!r} of "
                f"length {own.length}, received {count}; build the PageTable with a larger max_pages."
            )
        # New tokens enter no earlier page than a partial last one, so only that one may need a copy.
        shared = count > 0 and own.length % self.page_size > 0 and self._users[own.pages[-1]] > 1
        wanted = pages - len(own.pages) + shared
        # Nothing was changed so far, so an error leaves the table as it was.
        if wanted > len(self._free):
            raise OutOfPagesError(sequence, wanted, len(self._free))
        self._sequences[sequence] = own
        copies = []
        if shared:
            copies.append(PageCopy(own.pages[-1], self._take()))
            self._release(own.pages[-1])
            # The shared page stays with the other sequences; this one continues in its copy.
            own.pages[-1] = copies[0].target
        own.pages.extend(self._take() for _ in range(pages - len(own.pages)))
        own.length = length
        return copies

    def slots(self, sequence: Hashable, start: int, stop: int) -> np.ndarray:
        """The slots of tokens `start` to `stop - 1`, int32 `[stop - start]`; -1 for tokens in freed pages.

        Write only tokens that `allocate` added since the last `fork`; the pages of earlier ones may be shared.

        **Raises:** `ValueError` for an unknown sequence, or a range outside its length.
        """
        own = self._known(sequence)
        start, stop = read_count("start", start), read_count("stop", stop)
        if not start <= stop <= own.length:
            raise ValueError(
                f"stop: expected start <= stop <= {own.length}, the length of sequence {sequence!r}, received {start} to {stop}; allocate "
                "the tokens first."
            )
        positions = np.arange(start, stop, dtype=np.int32)
        pages = np.array(own.pages, np.int32)[positions // self.page_size]
        slots = pages * np.int32(self.page_size) + positions % self.page_size
        # The number -1 of a freed page would give slots from -p to -1; each of them becomes -1.
        return np.where(pages < 0, np.int32(-1), slots)

    def row(self, sequence: Hashable) -> np.ndarray:
        """The sequence's row of the page table, int32 `[M]`, padded with -1; `M` is `max_pages` or the number of its pages."""
        return self.rows([sequence])[0]

    def rows(self, sequences: Iterable[Hashable]) -> np.ndarray:
        """The page table of these sequences, int32 `[N, M]`; `M` is `max_pages` or the number of pages of the longest, at least 1."""
        rows = [self._known(sequence).pages for sequence in sequences]
        width = max([1, *map(len, rows)]) if self.max_pages is None else self.max_pages
        table = np.full((len(rows), width), -1, np.int32)
        for n, pages in enumerate(rows):
            table[n, : len(pages)] = pages
        return table

    def free(self, sequence: Hashable) -> None:
        """Removes the sequence and frees its pages, except those that other sequences share."""
        own = self._known(sequence)
        for page in own.pages[own.freed :]:
            self._release(page)
        # The leading pages that are -1 were freed before and are not released twice.
        del self._sequences[sequence]

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int | None = None) -> None:
        """Creates a sequence from the first tokens of another, by default all, which share its pages and must already be written.
        The first of them to write into a partial last page copies it.

        **Raises:** `ValueError` for an unknown parent, an existing child, more tokens than the parent has, or so few that the next
        token would see freed keys.
        """
        own = self._known(parent)
        count = own.length if num_tokens is None else read_count("num_tokens", num_tokens)
        if child in self._sequences:
            raise ValueError(
                f"child: expected a new sequence, received {child!r}, which exists already; free it first."
            )
        self._check_kept("num_tokens", parent, own, count)
        pages = own.pages[: self._pages_of(count)]
        for page in pages[own.freed :]:
            self._users[page] += 1
        # The child lacks the same leading pages, so the same limit protects its queries.
        self._sequences[child] = _Sequence(pages, count, own.freed, own.look_back)

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Keeps only the first `length` tokens, for instance after speculative decoding rejects some, and frees the pages after them.

        **Raises:** `ValueError` for an unknown sequence, a length greater than its own, or one so small that the next token would see freed
        keys (see `free_behind`).
        """
        own = self._known(sequence)
        length = read_count("length", length)
        self._check_kept("length", sequence, own, length)
        kept = self._pages_of(length)
        # The kept pages include all freed ones (`_check_kept`), so none of these is -1.
        for page in own.pages[kept:]:
            self._release(page)
        del own.pages[kept:]
        own.length = length

    def free_behind(self, sequence: Hashable, first_visible_position: int | None = None) -> None:
        """Frees the pages that lie entirely before a position, as behind a sliding window. Their entries in the row become -1.

        With a window of `w` keys, including the query's own, the first key visible to the next query is `max(0, length
        - w + 1)`. This is the default in a table with a `window`. If `truncate` may remove tokens later (rejected
        drafts), compute the position from the length that will be kept. A table without a `window` infers from these
        calls how far any query of the sequence looks back: the smallest length minus position so far.

        **Raises:** `ValueError` for an unknown sequence, for a position past its length or past the first key that the next query sees,
        or without a position in a table without a window.
        """
        own = self._known(sequence)
        latest, which = own.length, "the length"
        if self.window is not None:
            latest = max(0, own.length - self.window + 1)
            which = f"the first that a window of {self.window} reaches from the end"
        elif first_visible_position is None:
            raise ValueError(
                "first_visible_position: expected a position, received None; pass it, or build the PageTable with a window."
            )
        given = latest if first_visible_position is None else first_visible_position
        position = read_count("first_visible_position", given)
        if position > latest:
            raise ValueError(
                f"first_visible_position: expected at most {latest}, {which} of sequence {sequence!r}, received {position}; freed "
                "keys must not be visible."
            )
        look_back = own.length - position if self.window is None else self.window - 1
        # The smallest distance holds: each call promises that no later query sees keys before its position.
        own.look_back = look_back if own.look_back is None else min(own.look_back, look_back)
        # Only pages entirely before the position are freed; the one that contains it is still visible.
        for place in range(own.freed, position // self.page_size):
            self._release(own.pages[place])
            own.pages[place] = -1
        # An earlier call may have freed further, so the number of freed pages never falls.
        own.freed = max(own.freed, position // self.page_size)

    def check(self) -> None:
        """Verifies that every page is free or counted once for each sequence that holds it, and that rows cover lengths.

        **Raises:** `AssertionError` otherwise: a bug in this class, or threads that share a table without a lock.
        """
        users = [0] * self.num_pages
        for name, own in self._sequences.items():
            if len(own.pages) != self._pages_of(own.length):
                raise AssertionError(f"sequence {name!r} of length {own.length} has {len(own.pages)} pages")
            if not all((page == -1) == (n < own.freed) for n, page in enumerate(own.pages)):
                raise AssertionError(
                    f"sequence {name!r}, freed up to page {own.freed}, has pages {list(own.pages)}"
                )
            if own.length < self._least(own):
                raise AssertionError(
                    f"sequence {name!r} of length {own.length}, freed up to page {own.freed}, sees {own.look_back} keys behind it"
                )
            for page in own.pages[own.freed :]:
                users[page] += 1
        if users != self._users:
            raise AssertionError(f"pages are counted {self._users} times and used {users} times")
        # The lists are compared, not sets, so a page that is listed twice is found as well.
        if sorted(self._free) != [page for page, count in enumerate(users) if count == 0]:
            raise AssertionError(f"pages {self._free} are listed as free, and used {users} times")

    def _known(self, sequence: Hashable) -> _Sequence:
        own = self._sequences.get(sequence)
        if own is None:
            raise ValueError(
                f"sequence: expected a sequence that was allocated or forked, received {sequence!r}; allocate it first."
            )
        return own

    def _check_kept(self, name: str, sequence: Hashable, own: _Sequence, count: int) -> None:
        least = self._least(own)
        if not least <= count <= own.length:
            raise ValueError(
                f"{name}: expected {least} to {own.length} tokens of sequence {sequence!r}, received {count}. With fewer, the next token would "
                f"see some of the {own.freed * self.page_size} freed keys; more were never allocated. Free fewer pages, based on the length "
                "to keep, or pass the window to the PageTable."
            )

    def _least(self, own: _Sequence) -> int:
        """The smallest length of the sequence at which its next query sees no freed keys."""
        return own.freed * self.page_size + (own.look_back or 0) if own.freed else 0

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)
