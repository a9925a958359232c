"""The allocator of an engine's pages. Requests share pages with the same content."""

import collections
from collections.abc import Iterable, Sequence

from ..paged import OutOfPagesError


class Pages:
    """Keeps which pages are held by requests and which are free. A page may have several holders, and a free page may still have content.

    The digest of a page identifies its tokens and all tokens before them. If the last holder releases a page, the page keeps its content until it is
    needed. The page that was released first is reused first. `PageTable` differs: it shares pages between running sequences only.
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
        """Takes this many pages without content for the request `number`. If there are too few, it takes none and raises `OutOfPagesError`."""
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
        """The page with this digest, if there is one."""
        return self._known.get(digest)

    def is_used(self, page: int) -> bool:
        """Returns whether a request holds the page."""
        return self._users[page] > 0

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages with content."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def enter(self, page: int, digest: bytes) -> None:
        """Notes the content of a page that is in use. If another page has the same content, `find` still returns that one."""
        if self._known.setdefault(digest, page) == page:
            self._digests[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from the pages of a request. The last page goes first, since a page is useful only with those before it."""
        for page in reversed(pages):
            if page >= 0:
                self._users[page] -= 1
                if not self._users[page] and self._digests[page] is None:
                    self._empty.append(page)
                elif not self._users[page]:
                    self._idle[page] = None

    def clear(self) -> None:
        """Forgets the content of all pages."""
        for page in self._known.values():
            self._digests[page] = None
        self._known.clear()
        self._empty += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        digest, self._digests[page] = self._digests[page], None
        if digest is not None:
            del self._known[digest]
