"""The scheduler of an engine. It decides which tokens the next step processes, and gives slots and pages to requests. It does not use the device."""

import collections
from collections.abc import Collection

from ..models.sampling import SamplingArrays
from ..paged import OutOfPagesError
from .pages import Pages
from .prefixes import Prefixes
from .requests import Request

Plan = dict[Request, int]
"""The number of tokens of each request in a step."""


class Scheduler:
    """Plans steps of at most `step_tokens` tokens.

    A plan reserves pages and slots. After `plan` comes `started`, or `take_back`, which restores the state before.

    **Arguments:**

    - `page_size`: the number of tokens in a page. Models without attention have no `pages`, and a page size above the length of any request.
    - `window`: the maximum number of keys that a query sees; `None` for all.
    - `prefixes`: the prefix cache, if there is one.
    - `max_copies`: the maximum number of copies of states in a step, for reused prefixes.
    - `max_entries`: the maximum number of new entries of the page table in a step, for reused prefixes.
    - `max_drafts`: the maximum number of draft tokens of a request in a step.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        step_tokens: int,
        page_size: int,
        pages: Pages | None,
        window: int | None,
        prefixes: Prefixes | None,
        max_copies: int,
        max_entries: int,
        max_drafts: int = 0,
    ):
        self.step_tokens, self.page_size, self.window = step_tokens, page_size, window
        self.pages, self.prefixes = pages, prefixes
        self.max_copies, self.max_entries, self.max_drafts = max_copies, max_entries, max_drafts
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # in order of admission
        self.slots = list(range(max_batch))[::-1]
        self.sampling = SamplingArrays.of([], max_batch)  # by slot
        self.preemptions = 0
        # The state of a plan that has not started:
        self.entries: list[tuple[int, int, int]] = []  # new ones of the table: slot, column, page
        self.restores: list[tuple[int, int]] = []  # copies of states: a checkpoint and the slot of a request
        self.saves: list[
            tuple[Request, bytes, int]
        ] = []  # requests, with the digest and slot of a checkpoint
        self.drafts: dict[Request, list[int]] = {}
        self._reading: list[Request] = []
        self._reused: list[Request] = []

    def plan(self, under_way: bool) -> Plan | None:
        """The next step. `None` if pages run out while steps are under way. Their tokens must be known before a request is put back, and requests
        that end in them may free enough pages."""
        plan: Plan = {}
        before = self.preemptions
        for request in [request for request in self.running if request.remaining == 1 and request.computed]:
            if not self._grant(request, 1, plan, under_way):
                return None
        while self.slots and self.waiting and self.preemptions == before and self._fits(self.waiting[0]):
            self._admit()
        # Shorter prompts come first. Longer ones get what they leave of their shares.
        reading = [r for r in self.running if r.remaining and r not in plan and self._begin(r)]
        reading.sort(key=lambda request: request.remaining)
        for place, request in enumerate(reading):
            left = self.step_tokens - sum(plan.values())
            share = min(request.remaining, -(-left // (len(reading) - place)))
            count = self._chunk(request, share)
            if count > 0 and not self._grant(request, count, plan, under_way):
                return None
            if request in plan:
                self._reading.append(request)
                self._keep_state(request, request.computed + count)
        if self.max_drafts and not reading and not under_way:
            self._add_drafts(plan)
        return plan

    def may_draft(self) -> bool:
        """Returns whether the next step would have drafts if it waited for the steps under way, as far as the known tokens tell."""
        decoding = [request for request in self.running if request.remaining]
        reads = any(request.remaining > 1 or not request.computed for request in decoding)
        return not reads and bool(self._proposed(decoding))

    def _proposed(self, decoding: Collection[Request]) -> dict[Request, list[int]]:
        """Drafts of decoding requests. If there are fewer drafts than requests, there are none, since all requests take part in the longer step."""
        drafts = {}
        for request in decoding:
            most = min(self.max_drafts, request.last_length - len(request.tokens) - 1)
            if request.drafter is not None and (proposed := request.drafter.propose(request.tokens, most)):
                drafts[request] = proposed
        return drafts if sum(map(len, drafts.values())) >= len(decoding) else {}

    def _add_drafts(self, plan: Plan) -> None:
        """Adds drafts to a plan of decoding requests whose tokens are known, as far as tokens and pages are free."""
        for request, drafts in self._proposed(plan).items():
            room = request.room
            if self.pages is not None:
                room += self.pages.num_free * self.page_size
            most = min(self.step_tokens - sum(plan.values()), room - request.computed - 1)
            if drafts := drafts[:most]:
                self.drafts[request] = drafts
                plan[request] += len(drafts)
                if request.computed + plan[request] > request.room:
                    self._give_pages(request, plan[request])

    def started(self, plan: Plan) -> list[tuple[int, Request, int]]:
        """Notes that the step of this plan is under way. Returns the requests for which it chooses tokens, with their places and numbers of
        drafts."""
        writing = []
        for place, (request, count) in enumerate(plan.items()):
            request.computed += count
            drafts = len(self.drafts.get(request, ()))
            if request.computed == request.ready + drafts:  # not in the middle of its prompt
                request.wait()
                writing.append((place, request, drafts))
        if self.prefixes is not None:
            for request in self._reading:
                self.prefixes.enter(request, request.computed)
        if self.window is not None:
            self._free_behind(plan, self.window)
        self._end_plan()
        return writing

    def take_back(self) -> None:
        """Frees the pages and slots that were reserved for a step that does not start."""
        for request in self._reused:
            request.computed = 0
        if self.prefixes is not None:
            for _, digest, _ in self.saves:
                self.prefixes.drop_state(digest)
        self._end_plan()
        if self.pages is not None:
            for request in self.running:
                kept = -(-request.computed // self.page_size)
                self.pages.release(request.pages[kept:])
                del request.pages[kept:]
                request.room = kept * self.page_size

    def _end_plan(self) -> None:
        self.entries, self.restores, self.saves, self._reading, self._reused = [], [], [], [], []
        self.drafts = {}

    def put_back(self, request: Request) -> None:
        """Moves a request from the batch to the front of the queue. Its tokens are recomputed later."""
        self.release(request)
        self.waiting.appendleft(request)
        request.restart()

    def release(self, request: Request, shares: bool = True) -> None:
        """Removes the request from queue and batch, and frees its pages and slot. With `shares`, the prefix cache keeps their content."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.slots.append(request.slot)
        slot, request.slot = request.slot, -1
        self.entries = [entry for entry in self.entries if entry[0] != slot]
        self.restores = [copy for copy in self.restores if copy[1] != slot]
        if self.prefixes is not None:
            for save in [save for save in self.saves if save[0] is request]:
                self.saves.remove(save)
                self.prefixes.drop_state(save[1])
            for requests in (self._reading, self._reused):
                if request in requests:
                    requests.remove(request)
            if shares and self.pages is not None and not self.prefixes.stateful:
                self.prefixes.enter(request, request.computed)
            self.prefixes.end(request)
        if self.pages is not None:
            self.pages.release(request.pages)
        request.pages, request.freed, request.room = [], 0, 0

    def most_pages(self, length: int) -> int:
        """The maximum number of pages that a sequence of this length holds at any time."""
        if self.pages is None:
            return 0
        pages = -(-length // self.page_size)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window - 1 + self.step_tokens) // self.page_size) + 1)

    def _grant(self, request: Request, count: int, plan: Plan, under_way: bool) -> bool:
        """Enters this many tokens of a request in the plan, unless the request was put back. Returns False if pages run out while steps are under
        way."""
        if request.slot < 0:
            return True
        if request.computed + count > request.room:
            if (fits := self._allocate(request, count, plan, under_way)) is None:
                return False
            if not fits:
                return True
        plan[request] = count
        return True

    def _admit(self) -> None:
        """Gives the next request a slot. It has no pages yet."""
        request = self.waiting.popleft()
        request.room = self.page_size if self.pages is None else 0
        request.slot = self.slots.pop()
        self.running.append(request)
        for column, (value,) in zip(self.sampling, SamplingArrays.of([(request.sampling, 0)], 1)):
            column[request.slot] = value

    def _begin(self, request: Request) -> bool:
        """Gives a request its prefix from the cache. Returns False if the request must wait, either for another request that is computing more of the
        same prefix, or for a step that can still take the copies."""
        if request.computed or self.prefixes is None:
            return True
        if request.awaits is not None:
            other, length = request.awaits
            if other.slot >= 0 and other.computed < length:
                return False
            request.awaits = None
        unit, digests = self.prefixes.unit, self.prefixes.prompt_digests(request)
        pages, count = self.prefixes.find(digests[: self.max_entries])
        for place in range(len(digests), count, -1):
            other = self.prefixes.computing.get(digests[place - 1])
            if other is not None and other is not request:
                request.awaits = other, place * unit
                other.boundaries.add(place * unit)
                return False
        entries = len(pages) + sum(len(other.pages) for other in self._reused)
        if entries > self.max_entries or (
            count and self.prefixes.stateful and len(self.restores) == self.max_copies
        ):
            return False
        if self.prefixes.stateful:
            request.boundaries |= {place * unit for place in (self.prefixes.seen(digests), len(digests))}
        if count:
            if self.pages is not None:
                self.pages.share(pages)
                request.pages, request.room = pages, len(pages) * self.page_size
                self.entries += [(request.slot, place, page) for place, page in enumerate(pages)]
            if self.prefixes.stateful:
                self.restores.append((self.prefixes.state(digests[count - 1]), request.slot))
            request.computed = count * unit
            self._reused.append(request)
        self.prefixes.begin(request, digests, count)
        return True

    def _chunk(self, request: Request, count: int) -> int:
        """The number of tokens in the next chunk of a prompt, at most `count`. A chunk ends where a checkpoint is wanted. A long chunk ends with a
        page."""
        if self.prefixes is None or not self.prefixes.stateful:
            return count
        first, unit = request.computed, self.prefixes.unit
        end = min([first + count, *(place for place in request.boundaries if place > first)])
        # Only long chunks are cut, so that the step stays nearly full.
        return end - first - (end % unit if end < request.ready and count >= 8 * unit else 0)

    def _keep_state(self, request: Request, end: int) -> None:
        """Reserves a checkpoint for the state after a chunk that ends with a page, if the step can still take the copy."""
        if self.prefixes is None or not self.prefixes.stateful or not request.shares:
            return
        if end % self.prefixes.unit == 0 and end < len(request.tokens) and len(self.saves) < self.max_copies:
            digest = self.prefixes.digest(request, end)[-1]
            if (slot := self.prefixes.keep_state(digest)) is not None:
                self.saves.append((request, digest, slot))

    def _allocate(self, request: Request, count: int, plan: Plan, under_way: bool) -> bool | None:
        """Allocates pages for more tokens. If necessary, it puts the newest requests back. Returns False if it put this one back, and `None` if pages
        run out while steps are under way."""
        while True:
            try:
                self._give_pages(request, count)
                return True
            except OutOfPagesError:
                if under_way:
                    return None
                youngest = self.running[-1]
                plan.pop(youngest, None)
                self.put_back(youngest)
                self.preemptions += 1
                if youngest is request:
                    return False

    def _give_pages(self, request: Request, count: int) -> None:
        """Gives a request pages for more tokens."""
        if self.pages is None:
            return
        held, wanted = len(request.pages), -(-(request.computed + count) // self.page_size)
        pages = self.pages.take(request.number, wanted - held)
        self.entries += [(request.slot, place, page) for place, page in enumerate(pages, held)]
        request.pages += pages
        request.room = wanted * self.page_size

    def _fits(self, request: Request) -> bool:
        """Returns whether there are pages for all tokens of a request, beside the pages that other prompts still need and one more for each of
        them."""
        if self.pages is None:
            return True
        wanted = self.most_pages(len(request.tokens))
        if self.prefixes is not None:
            shared, _ = self.prefixes.find(self.prefixes.prompt_digests(request))
            wanted -= sum(map(self.pages.is_used, shared))
        for other in self.running:
            held = len(other.pages) - other.freed
            if other.awaits is not None:
                held = other.awaits[1] // self.page_size
            wanted += max(1, self.most_pages(len(other.tokens) + other.awaited) - held)
        return wanted <= self.pages.num_free

    def _free_behind(self, plan: Plan, window: int) -> None:
        """Frees pages that no later step reads, whichever drafts are right. Steps under way may still read them: a later step writes after that."""
        for request in plan:
            if self.pages is not None:
                known = request.computed - len(self.drafts.get(request, ()))
                first = max(0, known - window + 1) // self.page_size
                self.pages.release(request.pages[request.freed : first])
                request.pages[request.freed : first] = [-1] * (first - request.freed)
                request.freed = max(first, request.freed)
