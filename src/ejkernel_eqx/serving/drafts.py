"""Draft tokens of a request, looked up in its own tokens."""

from collections.abc import Sequence

_LONGEST_PAUSE = 31


class Drafter:
    """Proposes what followed the last place whose tokens are those at the end of a growing text, as `looked_up` of `models/speculative.py` does on
    the device (prompt lookup, Saxena 2023). After drafts of which none was accepted it pauses, each time for twice as many tokens.

    **Arguments:**

    - `max_ngram`: how many tokens at the end of the text are looked for at most.
    """

    def __init__(self, max_ngram: int):
        self._max_ngram = max_ngram
        self._next: dict[tuple[int, ...], int] = {}  # the place behind the last occurrence
        self._length = 1  # tokens before the last one whose occurrences are known
        self._pause, self._until = 0, 0

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """Drafts for the next `count` tokens; none if the end of the text is new. A text that ends before is taken to repeat itself."""
        if len(text) < self._until:
            return []
        for end in range(self._length, len(text)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._next[tuple(text[end - size : end])] = end
        self._length = max(self._length, len(text))
        for size in range(min(self._max_ngram, len(text)), 0, -1):
            if (place := self._next.get(tuple(text[-size:]))) is not None:
                period = len(text) - place
                return [text[place + ahead % period] for ahead in range(count)]
        return []

    def learn(self, length: int, accepted: int) -> None:
        """So many of the last drafts were accepted; the text has `length` tokens now."""
        self._pause = 0 if accepted else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._until = length + self._pause
