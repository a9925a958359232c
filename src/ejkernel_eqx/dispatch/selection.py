"""The selection chain: tiers in order, of which the first answer wins.

Everything that tiers read is in a `Snapshot`, which is collected when a module is built (`snapshot.py`). Choosing is then a pure function of
the snapshot and a problem, and happens while a call is traced.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from .._errors import UnsupportedError
from .device import DeviceFacts
from .known import Key, Known, memory_cache, NOISE, slow_words, slowness, Table
from .overlay import Policy, within
from .platform import Platform
from .problem import Problem
from .registry import Implementation, names_of, of_device
from .transfer import Index, make_index, nearest, nearest_comparison
from .workload import BOTH, FORWARD


class Tier(enum.StrEnum):
    """Holds where a configuration came from, in the order of the tiers."""

    OVERRIDE = "override"
    OVERLAY = "overlay"
    MEMORY = "memory"
    PERSISTENT = "persistent"
    AUTOTUNE = "autotune"
    HEURISTIC = "heuristic"
    ERROR = "error"


_LOOKED_UP = (Tier.MEMORY, Tier.PERSISTENT, Tier.AUTOTUNE)

Pins = Mapping[Key, tuple[Known, Tier]]
"""Choices made for a module itself, each with the tier that it came from."""

TABLES = {"tuned": Tier.AUTOTUNE, "memory": Tier.MEMORY, "user": Tier.PERSISTENT, "shipped": Tier.PERSISTENT}
"""The tables that answer for exactly a problem, the most trusted one first, and the tier of each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that the tiers of an operation may answer with, as of when a module was built.

    `requested` is the platform requested by name. `overlay` maps an operation's name or a problem key to a configuration.
    The tables: `memory` of this process, `user` from the user's files, `shipped` with the package for this kind of device, `borrowed` from
    another kind. `pinned` holds the choices made for the module itself. Tuned ones take precedence over all tables; the others match what is
    chosen anyway.
    """

    operation: str
    implementations: tuple[Implementation, ...]
    device: DeviceFacts
    policy: Policy
    requested: Platform | None = None
    override: Any | None = None
    overlay: tuple[tuple[str, Any], ...] = ()
    memory: Table = dataclasses.field(default_factory=dict)
    user: Table = dataclasses.field(default_factory=dict)
    shipped: Table = dataclasses.field(default_factory=dict)
    borrowed: Table = dataclasses.field(default_factory=dict)
    pinned: Pins = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        known = sum(map(len, (self.memory, self.user, self.shipped, self.borrowed, self.tuned)))
        return f"Snapshot({self.operation} on {self.device.kind}: {known} known, {len(self.pinned)} pinned)"

    def with_pins(self, pinned: Pins) -> "Snapshot":
        """The same snapshot with other choices made for the module itself."""
        return dataclasses.replace(self, pinned=dict(pinned))

    @functools.cached_property
    def tuned(self) -> Table:
        """The choices made for the module itself by the tuner."""
        return {key: known for key, (known, tier) in self.pinned.items() if tier is Tier.AUTOTUNE}

    @property
    def request(self) -> tuple[Any, ...]:
        """Returns what was requested, independent of tables and device; plans with equal requests and pins are equal."""
        if self.override is not None:
            return (self.operation, self.implementations, self.override)
        return (self.operation, self.implementations, self.overlay, self.policy is Policy.HEURISTIC)

    @functools.cached_property
    def asked(self) -> tuple[tuple[str, Implementation], ...]:
        """The implementations that apply on the device, in order, by name: one per platform, if any of its implementations is usable."""
        known = of_device(self.implementations, self.device)
        return tuple(zip(names_of(known), known, strict=True))

    @functools.cached_property
    def pins(self) -> frozenset[Any]:
        """The pins that a table or the tuner answers exactly, without provenance."""
        if self.override is not None:
            return frozenset()
        looked_up = [(key, known) for key, (known, tier) in self.pinned.items() if tier in _LOOKED_UP]
        return frozenset([(*key, known.config) for key, known in looked_up if key in self._all])

    @functools.cached_property
    def answers(self) -> str:
        """A digest of what decides a choice besides the request, without provenance; the same in every process."""
        tables = () if self.override is not None else (self._all.items(), self.borrowed.items())
        known = [
            sorted([(platform.value, key, repr(known.config)) for (platform, key), known in table])
            for table in tables
        ]
        return hashlib.sha256(repr((self.device, known, self._order())).encode()).hexdigest()[:16]

    def _order(self) -> list[tuple[str, str, str]]:
        """Returns which platforms are slower than which others, and for what, according to tables: everything that decides by times."""
        slower = []
        for table in (self._all, self.borrowed):
            by_key: dict[str, list[tuple[Platform, Known]]] = {}
            for (platform, key), known in table.items():
                by_key.setdefault(key, []).append((platform, known))
            for key, known in by_key.items():
                for (one, first), (other, second) in itertools.permutations(known, 2):
                    directions = [d for d in (BOTH, FORWARD) if slowness(first, second, d)]
                    slower += [(key, f"{one.value} {direction}", other.value) for direction in directions]
        return sorted(slower)

    def known_exactly(self, platform: Platform, key: str) -> tuple[Known, Tier] | None:
        """Returns what is known about exactly this problem, and from which tier."""
        tables = [(getattr(self, name), tier) for name, tier in TABLES.items()]
        return next(
            ((table[platform, key], tier) for table, tier in tables if (platform, key) in table), None
        )

    @functools.cached_property
    def _all(self) -> Table:
        """All exact answers, the most trusted one for each problem."""
        return {**self.shipped, **self.user, **self.memory, **self.tuned}

    @functools.cached_property
    def near(self) -> list[Index]:
        """Returns what is known on this device, then on the most similar other one, for guesses at nearby shapes."""
        return [make_index(table) for table in (self._all, self.borrowed) if table]

    def __getstate__(self) -> dict[str, Any]:
        """The state without cached values, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


Autotuner = Callable[[Problem, Implementation, DeviceFacts], Any | None]
Ask = Callable[[Snapshot, Implementation, Problem], Known | None]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Holds what was chosen for a problem, and why preceding platforms were not.

    `origin` says in more detail than `tier` where the configuration came from. `ms` has its measured times by
    direction. `device` is the device that it was chosen for. `remarks` are an operation's own, and `path` is that of
    the plan. Rejected implementations are named as by `registry.names_of`.
    """

    problem: Problem
    implementation: Implementation
    config: Any
    tier: Tier
    rejected: tuple[tuple[str, str], ...]
    origin: str = ""
    ms: tuple[tuple[str, float], ...] = ()
    device: DeviceFacts | None = None
    remarks: tuple[str, ...] = ()
    path: str = ""

    @property
    def platform(self) -> Platform:
        return self.implementation.platform


def select(
    snapshot: Snapshot,
    problem: Problem,
    *,
    tuning: bool = False,
    platform: Platform | None = None,
    direction: str = BOTH,
    answers: dict[Key, tuple[Known, Tier]] | None = None,
) -> Selection:
    """The first platform that supports the problem, with its configuration, or a later one that tables show to be faster for exactly this
    problem or, if they know neither, at the nearest shape. `direction`: whose times decide, `FORWARD` or `BOTH`. What a platform runs by request
    alone it gets only if it is named.

    Pure unless `tuning`, which lets the autotune tier run if the policy deems the tables insufficient. `platform` restricts the choice to
    one platform. `answers` receives what was known about the supporting platforms, and from which tier: first those passed over, because all
    configurations were denied or another platform is faster, and last the chosen one. `UnsupportedError` with every platform's reason if none
    supports the problem.
    """
    rejected: list[tuple[str, str]] = []
    passed_over: list[_Answer] = []
    chosen: _Answer | None = None
    for name, implementation in snapshot.asked:
        if platform not in (None, implementation.platform):
            continue
        reason = implementation.unsupported(problem, snapshot.device)
        if reason is None and platform is snapshot.requested is snapshot.override is None:
            reason = implementation.hooks.by_request(problem, snapshot.device)
        if reason is None:
            known, tier = _first_answer(snapshot, implementation, problem, tuning and chosen is None)
            answer = _Answer(name, implementation, known, tier)
            if chosen is not None:
                slower = _why_slower(snapshot, problem, chosen, answer, direction)
                if slower is not None:
                    rejected.append((chosen.name, slower))
                    passed_over.append(chosen)
                    chosen = answer
            elif known.config is not None:
                chosen = answer
            else:
                reason = known.denied
                passed_over.append(answer._replace(tier=Tier.AUTOTUNE))
        if chosen is None and reason is not None:
            rejected.append((name, reason))
    if answers is not None:
        every = passed_over if chosen is None else [*passed_over, chosen]
        answers.update({(a.implementation.platform, problem.key()): (a.known, a.tier) for a in every})
    if chosen is not None:
        return Selection(
            problem=problem,
            implementation=chosen.implementation,
            config=chosen.known.config,
            tier=chosen.tier,
            rejected=tuple(rejected),
            origin=chosen.known.origin,
            ms=chosen.known.ms,
            device=snapshot.device,
        )
    if not rejected and platform is not None:
        rejected.append((platform, "is not among the platforms that the module was built for"))
    raise UnsupportedError(problem.operation, dict(rejected))


class _Answer(NamedTuple):
    """Says how a platform would run a problem."""

    name: str
    implementation: Implementation
    known: Known
    tier: Tier


def _why_slower(
    snapshot: Snapshot, problem: Problem, one: _Answer, other: _Answer, direction: str
) -> str | None:
    """The reason why another answer is preferred to one; `None` if it is not. Times of the problem itself decide, or guesses if nothing is known
    of it."""
    if one.known.sizes and other.known.sizes:
        found = slowness(one.known, other.known, direction)
        return None if found is None else slow_words(other.name, found)
    for answer in (one, other):
        guessed = answer.tier in (Tier.PERSISTENT, Tier.HEURISTIC)
        if not guessed or snapshot.known_exactly(answer.implementation.platform, problem.key()) is not None:
            return None
    implementations = one.implementation, other.implementation
    for index in snapshot.near:
        near = nearest_comparison(index, implementations, problem, snapshot.device, direction)
        if near is not None:
            return slow_words(other.name, *near) if near[0][0] > NOISE else None
    return None


def _first_answer(
    snapshot: Snapshot, implementation: Implementation, problem: Problem, tuning: bool
) -> tuple[Known, Tier]:
    before = _BEFORE_TUNING[snapshot.policy] if tuning and _autotuner is not None else ()
    for source in (*before, *_WITHOUT_TUNER):
        tier, ask = SOURCES[source]
        known = ask(snapshot, implementation, problem)
        if known is not None:
            return known, tier
    raise UnsupportedError(
        problem.operation, {implementation.platform.value: "has no configuration for this problem"}
    )


def _override(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
    return None if snapshot.override is None else Known(snapshot.override, origin="given as config=")


def _overlay(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
    if not snapshot.overlay:
        return None
    config_type = implementation.hooks.config_type
    for wanted in (problem.key(), problem.operation):
        for key, config in snapshot.overlay:
            if key == wanted and isinstance(config, config_type):
                return Known(config, origin="overlay_cache")
    return None


def _in_table(name: str) -> Ask:
    def look_up(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
        table: Table = getattr(snapshot, name)
        known = table.get((implementation.platform, problem.key())) if table else None
        return None if known is None else _if_it_runs(known, snapshot, implementation, problem)

    return look_up


def _if_it_runs(
    known: Known, snapshot: Snapshot, implementation: Implementation, problem: Problem
) -> Known | None:
    """The answer if it applies to exactly this problem, since it may have been measured at another length with the same key."""
    if known.config is None:
        return known
    reason = implementation.config_unsupported(known.config, problem, snapshot.device)
    return known if reason is None else None


def _autotune(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
    answer = None if _autotuner is None else _autotuner(problem, implementation, snapshot.device)
    if answer is None:
        return None
    if not isinstance(answer, Known):
        stored = memory_cache.known(implementation.platform, problem.key())
        answer = stored if stored and stored.config == answer else Known(answer, origin="tuned now")
    return _if_it_runs(answer, snapshot, implementation, problem)


def _transfer(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
    for index in snapshot.near:
        known = nearest(index, implementation, problem, snapshot.device)
        if known is not None:
            return known
    return None


def _heuristic(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Known | None:
    config = implementation.hooks.default_config(problem, snapshot.device)
    return None if config is None else Known(config)


SOURCES: dict[str, tuple[Tier, Ask]] = {
    "override": (Tier.OVERRIDE, _override),
    "overlay": (Tier.OVERLAY, _overlay),
    **{name: (tier, _in_table(name)) for name, tier in TABLES.items()},
    "tuner": (Tier.AUTOTUNE, _autotune),
    "near": (Tier.PERSISTENT, _transfer),
    "heuristic": (Tier.HEURISTIC, _heuristic),
}
"""The sources of a configuration in the order in which they are asked, each with its tier."""

_WITHOUT_TUNER = tuple(source for source in SOURCES if source != "tuner")


def _up_to_tuner(*passed_over: str) -> tuple[str, ...]:
    first = list(SOURCES)[: list(SOURCES).index("tuner") + 1]
    return tuple(source for source in first if source not in passed_over)


_BEFORE_TUNING: dict[Policy, tuple[str, ...]] = {
    Policy.HEURISTIC: (),
    Policy.CACHED: _up_to_tuner(),
    Policy.TUNE: _up_to_tuner("shipped"),
    Policy.FORCE: _up_to_tuner(*TABLES),
}
"""The sources that come first when tuning is requested, with the tuner as the last."""


def _tuner_of_package(problem: Problem, implementation: Implementation, device: DeviceFacts) -> Known | None:
    """The package's own tuner, which is imported when it is first asked."""
    tuning = importlib.import_module(".tuning", __name__.partition(".")[0])
    return tuning.autotune_tier(problem, implementation, device)


_autotuner: Autotuner | None = _tuner_of_package


def set_autotuner(autotuner: Autotuner | None) -> None:
    """Sets the function behind the autotune tier: (problem, implementation, device) -> configuration (or `Known`), or `None`. By default it is
    the package's own tuner."""
    global _autotuner
    _autotuner = autotuner


Listener = Callable[[Selection], None]
_LISTENERS: ContextVar[tuple[tuple[Listener, Listener], ...]] = ContextVar(
    "ejkernel_eqx_listeners", default=()
)


def announce(selection: Selection) -> None:
    """Notifies every listener of a choice whose kernel is being traced."""
    for listener, _ in _LISTENERS.get():
        listener(selection)


# Part of the key of every cache of traces.
_asking = jax.make_user_context(0)
_questions = itertools.count(1)


def traced_anew() -> contextlib.AbstractContextManager:
    """Inside this context every function is traced anew, because JAX caches traces by equal plans, whose choices may have other origins."""
    return _asking(next(_questions))


def is_traced_anew() -> bool:
    return _asking.value != 0


def _nothing(selection: Selection) -> None:
    pass


@contextlib.contextmanager
def on_selection(listener: Listener, withdrawn: Listener = _nothing) -> Iterator[None]:
    """Inside this context `listener` is called with every choice made, including the tier that answered, and `withdrawn` with those that
    turn out not to be used (the same objects). Cached traces of JAX do not hide choices."""
    with within(_LISTENERS, (*_LISTENERS.get(), (listener, withdrawn))), traced_anew():
        yield


@contextlib.contextmanager
def replaceable() -> Iterator[Callable[[], None]]:
    """For code that is traced but that JAX may replace before anything is launched. Yields a function that withdraws the choices made inside
    from listeners."""
    made: list[Selection] = []

    def take_back() -> None:
        for selection in made:
            for _, withdraw in _LISTENERS.get():
                withdraw(selection)

    token = _LISTENERS.set((*_LISTENERS.get(), (made.append, _nothing)))
    try:
        yield take_back
    finally:
        _LISTENERS.reset(token)
