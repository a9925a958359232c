"""Which sequence has which pages: the bookkeeping of a paged cache, on the host."""

import array
import dataclasses
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

from ..._errors import EjkernelError
from ...sequences.packing import read_count
from .pages import check_room


class OutOfPagesError(EjkernelError):
    """There are not as many free pages as an allocation needs. Nothing was allocated.

    `sequence`, `wanted` and `free` say whose allocation it was, how many pages it needs and how many there are.
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
            f"num_pages: expected {self.wanted} free pages for sequence {self.sequence!r}, found {self.free}; free a sequence or what it "
            "does not see any more (free_behind), let this one wait, or build the cache and its PageTable with more pages."
        )


class PageCopy(NamedTuple):
    """Page `source` is to be copied to page `target`."""

    source: int
    target: int


@dataclasses.dataclass
class _Sequence:
    pages: array.array  # int32, one for every p tokens; -1 where it was freed
    length: int = 0
    freed: int = 0  # how many of the first pages are -1
    look_back: int | None = (
        None  # how many keys before its own a query sees at most, as `free_behind` has been told
    )


class PageTable:
    r"""Gives the pages of a cache to sequences as they grow, shares them between forks, and takes them back.

    Token $j$ of a sequence is kept at slot $\text{page}_{\lfloor j / p \rfloor} \cdot p + j \bmod p$. A page may belong to several
    sequences (`fork`); before one of them writes into it, it gets a copy of its own, which `allocate` asks for (copy-on-write; Kwon et
    al., 2023, arXiv:2309.06180, section 4.4). Nothing here holds an array of JAX.

    ```python
    table = PageTable(num_pages=1024, page_size=16)
    copies = table.allocate("request 7", 100)  # room for 100 tokens, now its length
    slots = table.slots("request 7", 0, 100)
    ```

    **Arguments:**

    - `num_pages`, `page_size`: those of the cache.
    - `max_pages`: the most pages of one sequence, which is how wide its row is; by default rows are as wide as they need to be.
    - `window`: the most keys that a query sees, its own included, over all layers; by default all. `free_behind` frees nothing that it
        reaches, and `truncate` and `fork` keep a sequence as long as what was freed behind it stays out of reach.

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
        self._free = list(range(self.num_pages))[::-1]
        self._users = [0] * self.num_pages
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """Pages of no sequence."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages of at least one sequence."""
        return self.num_pages - len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """All sequences, in the order in which they came."""
        return tuple(self._sequences)

    def length(self, sequence: Hashable) -> int:
        """How many tokens the sequence has, those of pages freed behind it included.

        **Raises:** `ValueError` for an unknown sequence, as every method but `allocate`.
        """
        return self._known(sequence).length

    def allocate(self, sequence: Hashable, num_tokens: int) -> list[PageCopy]:
        """Makes room for `num_tokens` more tokens, all of it or, with an error, none, and adds them to the sequence's length.

        An unknown sequence begins with these.

        **Returns:** pages to copy before anything is written (`cache.copy_pages`): none, or the partial last page if it is shared. Copy
        after every call, or together for calls between which nothing was freed or forked.

        **Raises:** [`ejkernel_eqx.paged.cache.allocator.OutOfPagesError`][] if there are too few free pages; `ValueError` for a negative
        number, or more than `max_pages`. The table is as before.
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
        shared = count > 0 and own.length % self.page_size > 0 and self._users[own.pages[-1]] > 1
        wanted = pages - len(own.pages) + shared
        if wanted > len(self._free):
            raise OutOfPagesError(sequence, wanted, len(self._free))
        self._sequences[sequence] = own
        copies = []
        if shared:
            copies.append(PageCopy(own.pages[-1], self._take()))
            self._release(own.pages[-1])
            own.pages[-1] = copies[0].target
        own.pages.extend(self._take() for _ in range(pages - len(own.pages)))
        own.length = length
        return copies

    def slots(self, sequence: Hashable, start: int, stop: int) -> np.ndarray:
        """Where tokens `start` to `stop - 1` are kept, int32 `[stop - start]`; -1 for those freed behind the sequence.

        Only tokens that `allocate` added since the last `fork` may be written: before them a page may be shared.

        **Raises:** `ValueError` for an unknown sequence, or a range that is not within its length.
        """
        own = self._known(sequence)
        start, stop = read_count("start", start), read_count("stop", stop)
        if not start <= stop <= own.length:
            raise ValueError(
                f"stop: expected start <= stop <= {own.length}, the length of sequence {sequence!r}, received {start} to {stop}; allocate "
                "its tokens first."
            )
        positions = np.arange(start, stop, dtype=np.int32)
        pages = np.array(own.pages, np.int32)[positions // self.page_size]
        return np.where(
            pages < 0, np.int32(-1), pages * np.int32(self.page_size) + positions % self.page_size
        )

    def row(self, sequence: Hashable) -> np.ndarray:
        """The sequence's row of the page table, int32 `[M]`, -1 behind its pages; `M` is `max_pages` or the number of its pages."""
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
        """Forgets the sequence. Its pages are free, but for those that it shares."""
        own = self._known(sequence)
        for page in own.pages[own.freed :]:
            self._release(page)
        del self._sequences[sequence]

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int | None = None) -> None:
        """A new sequence with the first tokens of another, by default all, in the same pages, where they must have been written.
        Whoever writes first into a partial last page copies it.

        **Raises:** `ValueError` for an unknown parent, a child that is there already, or more tokens than the parent has, or so few
        that the next one would see keys that were freed behind it.
        """
        own = self._known(parent)
        count = own.length if num_tokens is None else read_count("num_tokens", num_tokens)
        if child in self._sequences:
            raise ValueError(
                f"child: expected a new sequence, received {child!r}, which is there already; free it first."
            )
        self._check_kept("num_tokens", parent, own, count)
        pages = own.pages[: self._pages_of(count)]
        for page in pages[own.freed :]:
            self._users[page] += 1
        self._sequences[child] = _Sequence(pages, count, own.freed, own.look_back)

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Keeps the first `length` tokens, as after speculative decoding some are rejected. Pages wholly behind them are free.

        **Raises:** `ValueError` for an unknown sequence, or a length above its own, or one so low that the next token would see keys that
        were freed behind it (see `free_behind`).
        """
        own = self._known(sequence)
        length = read_count("length", length)
        self._check_kept("length", sequence, own, length)
        kept = self._pages_of(length)
        for page in own.pages[kept:]:
            self._release(page)
        del own.pages[kept:]
        own.length = length

    def free_behind(self, sequence: Hashable, first_visible_position: int | None = None) -> None:
        """Frees the pages wholly before a position, as behind a sliding window; in the row they become -1.

        With a window of `w` keys, the query's own included, the next query of a sequence sees from `max(0, length - w + 1)` on, the
        default in a table with a `window`. Where `truncate` will take tokens back (rejected drafts), count from the length that is kept.
        A table without a `window` takes the least that it has been told, length minus position, for how far any query of the sequence
        looks back.

        **Raises:** `ValueError` for an unknown sequence, or a position past its length or past what the next query sees, or none in a
        table without a window.
        """
        own = self._known(sequence)
        latest, which = own.length, "the length"
        if self.window is not None:
            latest = max(0, own.length - self.window + 1)
            which = f"the first that a window of {self.window} reaches from the end"
        elif first_visible_position is None:
            raise ValueError(
                "first_visible_position: expected a position, received None; give it, or build the PageTable with a window."
            )
        given = latest if first_visible_position is None else first_visible_position
        position = read_count("first_visible_position", given)
        if position > latest:
            raise ValueError(
                f"first_visible_position: expected at most {latest}, {which} of sequence {sequence!r}, received {position}; what is freed "
                "must be out of sight."
            )
        look_back = own.length - position if self.window is None else self.window - 1
        own.look_back = look_back if own.look_back is None else min(own.look_back, look_back)
        for place in range(own.freed, position // self.page_size):
            self._release(own.pages[place])
            own.pages[place] = -1
        own.freed = max(own.freed, position // self.page_size)

    def check(self) -> None:
        """Verifies that every page is free or counted once for each sequence that has it, and that rows cover lengths.

        **Raises:** `AssertionError` if not, which would be a mistake of this class, or of threads that share one without a lock.
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
        if sorted(self._free) != [page for page, count in enumerate(users) if count == 0]:
            raise AssertionError(f"pages {self._free} are said to be free, and used {users} times")

    def _known(self, sequence: Hashable) -> _Sequence:
        own = self._sequences.get(sequence)
        if own is None:
            raise ValueError(
                f"sequence: expected one that was allocated or forked, received {sequence!r}; allocate it first."
            )
        return own

    def _check_kept(self, name: str, sequence: Hashable, own: _Sequence, count: int) -> None:
        least = self._least(own)
        if not least <= count <= own.length:
            raise ValueError(
                f"{name}: expected {least} to {own.length} tokens of sequence {sequence!r}, received {count}; from fewer the next one would "
                f"see keys among the {own.freed * self.page_size} that were freed behind it (free less, from the length that is kept, or "
                "tell the PageTable the window), and more were never allocated."
            )

    def _least(self, own: _Sequence) -> int:
        """The shortest that the sequence may become: its next query sees nothing that was freed."""
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
