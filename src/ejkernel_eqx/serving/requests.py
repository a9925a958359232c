"""Requests of an engine: their checks, the scheduler's record of each, and the events with their tokens."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..models import Sampling
from .drafts import Drafter


class RequestError(ValueError):
    """A request cannot be served. The message gives the reason and the remedy. Other requests are not affected."""


class Event(NamedTuple):
    """A generated token of a request.

    - `request`: the number of the request.
    - `token`: the token; -1 for none.
    - `finish`: `None`, or in the last event of a request the reason: `"length"`, `"stop"`, or `"error"`. `"error"` means that the logits were not
        finite. That event has no token.
    """

    request: int
    token: int
    finish: str | None = None


def read_integer(
    name: str,
    value: Any,
    least: int,
    most: int | None = None,
    remedy: str = "",
    error: type[ValueError] = RequestError,
) -> int:
    """Returns `value` as an int, if it is an integer of any library and in this range. Otherwise raises `error`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}: expected an integer {expected}, received {value!r}{remedy}.")
    return number


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """The scheduler's record of a request."""

    number: int
    tokens: list[int]
    """The prompt and the generated tokens, as far as the host knows them."""
    last_length: int
    sampling: Sampling
    stop: frozenset[int]
    ready: int
    """The number of tokens that the model can process, known or not; never the last one."""
    computed: int = 0
    """The number of tokens that the model has processed, or does in a step under way."""
    awaited: int = 0
    """The number of tokens that steps under way will choose."""
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    """Its pages in the order of its tokens; -1 for those freed behind a window."""
    freed: int = 0
    """The number of leading pages that are -1."""
    room: int = 0
    """The number of tokens that its pages hold."""
    drafter: Drafter | None = None
    """What proposes its next tokens, if it has drafts."""
    # For the prefix cache.
    digests: list[bytes] = dataclasses.field(default_factory=list)
    """A digest for each full page of its tokens, and of all tokens before."""
    shares: bool = True
    """Whether others may read its pages: all were computed with the present model."""
    entered: int = 0
    """The number of its pages that the cache has."""
    boundaries: set[int] = dataclasses.field(default_factory=set)
    """The lengths at which a chunk must end, for a checkpoint."""
    awaits: "tuple[Request, int] | None" = None
    """A request that computes the same first tokens now, and how many."""

    @property
    def remaining(self) -> int:
        """The number of known tokens that the model has not processed; 1 for a text that is decoding."""
        return self.ready - self.computed

    def wait(self) -> None:
        """Notes that a step under way will choose the next token."""
        self.awaited += 1
        if self.ready < self.last_length - 1:
            self.ready += 1

    def accept(self, accepted: int, drafts: int) -> None:
        """Notes how many drafts of a step were accepted. The tokens of that step are not appended yet."""
        self.computed -= drafts - accepted
        self.ready = min(self.ready + accepted, self.last_length - 1)
        if self.drafter is not None:
            self.drafter.learn(len(self.tokens) + 1 + accepted, accepted)

    def restart(self) -> None:
        """Notes that none of its tokens is computed any more."""
        self.computed, self.awaited, self.ready = 0, 0, len(self.tokens)
        self.entered, self.awaits, self.shares = 0, None, True
        self.boundaries.clear()


def read_request(
    number: int,
    prompt: Sequence[int] | bytes,
    max_new_tokens: int,
    sampling: Sampling | None,
    stop: Sequence[int],
    vocab_size: int,
) -> Request:
    """The record of a new request. All its arguments are checked except the length."""
    last, remedy = vocab_size - 1, "; encode it for this model"
    tokens = [read_integer(f"prompt[{i}]", token, 0, last, remedy) for i, token in enumerate(prompt)]
    ends = frozenset(read_integer("stop", token, 0, last, "; pass () for no stop token") for token in stop)
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise RequestError(
            f"sampling: expected a Sampling, received {type(sampling).__name__}; pass Sampling(temperature=...)."
        )
    return Request(number, tokens, len(tokens) + max_new_tokens, sampling, ends, ready=len(tokens))
