"""The prefix cache: finds the first tokens of a request that were computed before, by digests."""

import collections
import hashlib

import numpy as np

from .pages import Pages
from .requests import Request

_MOST_SEEN = 2**16


class Prefixes:
    """Finds the longest prefix of a request whose pages and states are kept.

    The digest of a page covers its tokens and the digest of the page before, so equal digests mean equal prefixes. Attention needs all pages of a
    prefix. Recurrent layers need the state after it, a checkpoint, which is in a slot of its own. If no slot is free, the checkpoint that was used
    least recently is replaced. A hybrid model needs pages and a checkpoint at the same length.

    **Arguments:**

    - `unit`: the number of tokens in a page.
    - `pages`: the pages of the attention layers, if there are any.
    - `slots`: the slots for checkpoints; empty for models without recurrent layers.
    """

    def __init__(self, unit: int, pages: Pages | None, slots: range):
        self.unit, self.pages, self.stateful = unit, pages, bool(slots)
        self.computing: dict[bytes, Request] = {}
        """The requests that will enter these pages of their prompts."""
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        """Forgets everything, after the caches or the model were replaced."""
        self._empty = list(self._slots)[::-1]
        self._states: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._seen: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.computing.clear()
        if self.pages is not None:
            self.pages.clear()

    def digest(self, request: Request, length: int) -> list[bytes]:
        """The digests of all full pages of the first `length` tokens."""
        digests, count = request.digests, length // self.unit
        if len(digests) < count:
            tokens = np.array(request.tokens[len(digests) * self.unit : count * self.unit], np.int32)
            for page in tokens.reshape(-1, self.unit):
                before = digests[-1] if digests else b""
                digests.append(hashlib.blake2b(before + page.tobytes(), digest_size=32).digest())
        return digests[:count]

    def prompt_digests(self, request: Request) -> list[bytes]:
        """The digests of the tokens that are known now, without the last one. That one must be computed to choose the next."""
        return self.digest(request, len(request.tokens) - 1)

    def find(self, digests: list[bytes]) -> tuple[list[int], int]:
        """The pages of the longest prefix that is kept, and their number."""
        pages = []
        if self.pages is not None:
            for digest in digests:
                if (page := self.pages.find(digest)) is None:
                    break
                pages.append(page)
        count = len(digests) if self.pages is None else len(pages)
        if self.stateful:
            count = next((n for n in range(count, 0, -1) if digests[n - 1] in self._states), 0)
        return pages[:count], count

    def seen(self, digests: list[bytes]) -> int:
        """The number of first pages that an earlier request had, too, whether they are kept or not. Remembers the pages of this request."""
        count = next((n for n, digest in enumerate(digests) if digest not in self._seen), len(digests))
        for digest in digests:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return count

    def state(self, digest: bytes) -> int:
        """The slot of a checkpoint. It counts as used now."""
        self._states.move_to_end(digest)
        return self._states[digest]

    def keep_state(self, digest: bytes) -> int | None:
        """A slot for a new checkpoint; `None` if this checkpoint is there already."""
        if digest in self._states:
            self._states.move_to_end(digest)
            return None
        if not self._empty:
            self._empty.append(self._states.popitem(last=False)[1])
        return self._states.setdefault(digest, self._empty.pop())

    def drop_state(self, digest: bytes) -> None:
        """Forgets a checkpoint that was not written."""
        if (slot := self._states.pop(digest, None)) is not None:
            self._empty.append(slot)

    def begin(self, request: Request, digests: list[bytes], count: int) -> None:
        """Notes that the request computes its pages after the first `count`."""
        request.entered = count
        for digest in digests[count:]:
            self.computing.setdefault(digest, request)

    def enter(self, request: Request, length: int) -> None:
        """Enters the full pages of a request's first `length` tokens, which are computed now."""
        length = min(length, len(request.tokens))
        first, last = request.entered, length // self.unit
        if last <= first or not request.shares:
            return
        for place, digest in enumerate(self.digest(request, length)[first:], first):
            if self.pages is not None:
                self.pages.enter(request.pages[place], digest)
            if self.computing.get(digest) is request:
                del self.computing[digest]
        request.entered = last

    def end(self, request: Request) -> None:
        """Notes that the request computes no more of its prompt."""
        for digest in request.digests[request.entered :]:
            if self.computing.get(digest) is request:
                del self.computing[digest]
