"""Draft tokens of a request, which are looked up in its own tokens."""

from collections.abc import Sequence

_LONGEST_PAUSE = 31


class Drafter:
    """Proposes the next tokens of a growing text (prompt lookup, Saxena 2023). It searches the text for an earlier place with the same tokens as its
    end, and proposes the tokens that followed there. `looked_up` in `models/speculative.py` does the same on the device. If no draft of a proposal is
    accepted, it pauses, each time for twice as many tokens.

    **Arguments:**

    - `max_ngram`: the maximum number of last tokens that are searched.
    """

    def __init__(self, max_ngram: int):
        self._max_ngram = max_ngram
        self._next: dict[tuple[int, ...], int] = {}  # the place behind the last occurrence
        self._length = 1  # tokens before the last one whose occurrences are known
        self._pause, self._until = 0, 0

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """Returns drafts for the next `count` tokens, or none if the end of the text is new. If fewer tokens followed there, they are repeated."""
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
        """Notes how many of the last drafts were accepted. The text now has `length` tokens."""
        self._pause = 0 if accepted else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._until = length + self._pause
