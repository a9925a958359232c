"""The allocator of an engine's pages, which are shared by their content."""

import collections
from collections.abc import Iterable, Sequence

from ..paged import OutOfPagesError


class Pages:
    """Pages that requests hold, alone or together, and pages that nobody holds, with or without content.

    A page with a digest has known content: the tokens of that page, after known tokens. If the last request leaves it, it keeps its content
    until the page is needed; the page that was left first goes first. `PageTable` shares pages between live sequences only.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._empty = list(range(num_pages))[::-1]
        self._users = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._known: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # with content, unused

    @property
    def num_free(self) -> int:
        """The number of pages that no request holds."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        """The number of pages that at least one request holds."""
        return self.num_pages - self.num_free

    def take(self, number: int, count: int) -> list[int]:
        """So many pages for request `number`, without content. Raises `OutOfPagesError`, and then takes none."""
        if count > self.num_free:
            raise OutOfPagesError(number, count, self.num_free)
        while len(self._empty) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._empty.append(page)
        pages = [self._empty.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def find(self, digest: bytes) -> int | None:
        """The page with this content."""
        return self._known.get(digest)

    def is_used(self, page: int) -> bool:
        """Whether a request holds the page."""
        return self._users[page] > 0

    def share(self, pages: Iterable[int]) -> None:
        """Pages with content get one more user."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def enter(self, page: int, digest: bytes) -> None:
        """From now on the page, which is in use, has this content. The first page of equal ones stays the one that is found."""
        if self._known.setdefault(digest, page) == page:
            self._digests[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """The pages of one request have one user less, the last first: without those before it, a page is of no use."""
        for page in reversed(pages):
            if page >= 0:
                self._users[page] -= 1
                if not self._users[page] and self._digests[page] is None:
                    self._empty.append(page)
                elif not self._users[page]:
                    self._idle[page] = None

    def clear(self) -> None:
        """Forgets all content."""
        for page in self._known.values():
            self._digests[page] = None
        self._known.clear()
        self._empty += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        digest, self._digests[page] = self._digests[page], None
        if digest is not None:
            del self._known[digest]
