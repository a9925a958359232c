"""Defines what is known about a problem (`Known`), from a record or in memory (`ConfigCache`), and compares times."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from .cache_file import warn_once
from .config import from_dict
from .platform import Platform
from .records import Record
from .registry import Implementation
from .workload import BOTH, FORWARD

Key = tuple[Platform, str]


@dataclasses.dataclass(frozen=True)
class Known:
    """Holds what a table says about one problem on one platform.

    - `config`: the configuration to use; `None` if all were denied, in which case the platform does not support the problem.
    - `ms`: the measured milliseconds by direction (`FORWARD`, `BOTH`).
    - `origin`: where it comes from, in words.
    - `denied`: why all configurations were denied.
    - `sizes`: those of the problem that was timed, since a key stands for a range of lengths.
    """

    config: Any
    ms: tuple[tuple[str, float], ...] = ()
    origin: str = ""
    denied: str = ""
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if (self.config is None) != bool(self.denied):
            raise ValueError(
                f"Known: expected either a config or the reason why all were denied, received {self.config!r} and {self.denied!r}."
            )


NOISE = 1.01
"""Measured ratios below this are within noise."""


def compared(known: Known, other: Known, direction: str = BOTH) -> tuple[float, str] | None:
    """The ratio of `known`'s time to the other's, and its direction: the one asked for if both have that time, else the other one. `None` if it
    was not the same work that was timed."""
    mine, theirs = dict(known.ms), dict(other.ms)
    possible = (direction, FORWARD if direction == BOTH else BOTH)
    found = next((d for d in possible if d in mine and d in theirs), None)
    if found is None or not known.sizes or known.sizes != other.sizes:
        return None
    return mine[found] / theirs[found], found


def slowness(known: Known, other: Known, direction: str = BOTH) -> tuple[float, str] | None:
    """Works as `compared`, if `known` is slower."""
    found = compared(known, other, direction)
    return found if found is not None and found[0] > NOISE else None


def slow_words(other: str, slowness: tuple[float, str], where: str = "") -> str:
    at = f" at the nearest shape, {where}" if where else ""
    return f"measured {slowness[0]:.2f} times as slow as {other}{at}, {slowness[1]}"


Table = Mapping[Key, Known]
"""What is known, by platform and `Problem.key()`. Tables are shared, and never changed once they are made."""


def config_of(record: Record, implementation: Implementation) -> Any | None:
    """The record's configuration, or `None` if all were denied; `ValueError` if it does not fit the implementation."""
    if record.config is None:
        return None
    try:
        config = from_dict(record.config, implementation.hooks.config_type)
        hash(config)
    except TypeError as error:  # a value of a type that the class does not accept
        raise ValueError(f"config: {error}") from None
    return config


def known_of(record: Record, implementation: Implementation, origin: str) -> Known:
    """Returns what a record says; `ValueError` if its configuration does not fit the implementation."""
    config = config_of(record, implementation)
    if config is not None:
        sizes = tuple(sorted(record.exact.get("dims", {}).items()))
        return Known(config, tuple(sorted(record.ms.items())), origin, sizes=sizes)
    reasons = [denied.reason for denied in record.denied]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    first = reasons[0] if reasons else "no reason"
    return Known(None, (), origin, f"every configuration was denied, {origin}: {first}{more}")


def fitting(
    implementation: Implementation, records: Iterable[Record], name: str, origin: Callable[[Record], str]
) -> Table:
    """Returns what the records of an implementation's version say; later records replace earlier ones.

    Entries of older versions are skipped silently; entries that no version up to this one can have written are skipped with one warning
    for the file `name`.
    """
    wanted = (implementation.operation, implementation.platform.value)
    ours = [record for record in records if (record.operation, record.platform) == wanted]
    if not ours:
        return {}
    try:
        implementation.load()
    except ModuleNotFoundError:  # software that its configurations need is not installed
        return {}
    table, refused = {}, []
    for record in ours:
        try:
            if record.version > implementation.version:
                raise ValueError(
                    f"is of version {record.version} of the kernels, this package has {implementation.version}"
                )
            if record.version == implementation.version:
                place = implementation.platform, record.problem
                table[place] = known_of(record, implementation, origin(record))
        except ValueError as error:
            refused.append(f"{record.problem}: {error}")
    if refused:
        message = "%s: %d entries of %s on %s do not fit this package and are ignored; the first: %s"
        warn_once(name, f"entries of {' on '.join(wanted)}", message, name, len(refused), *wanted, refused[0])
    return table


def joined(tables: Iterable[Table]) -> Table:
    """The rows of all tables; later ones replace earlier ones."""
    return {key: known for table in tables for key, known in table.items()}


class ConfigCache:
    """Configurations found in this process, by platform and `Problem.key()`."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}
        self._by_operation: dict[tuple[str, frozenset[Platform]], Table] = {}

    def put(self, platform: Platform, problem_key: str, config: Any) -> None:
        """Stores a configuration or a `Known`."""
        known = config if isinstance(config, Known) else Known(config, origin="put into the memory cache")
        self._known[platform, problem_key] = known
        self._by_operation = {}

    def known(self, platform: Platform, problem_key: str) -> Known | None:
        """Everything known about a problem."""
        return self._known.get((platform, problem_key))

    def get(self, platform: Platform, problem_key: str) -> Any | None:
        """The configuration, or `None` if none is known or all were denied."""
        known = self.known(platform, problem_key)
        return known.config if known else None

    def table(self, operation: str, platforms: Collection[Platform]) -> Table:
        """Returns what is known about an operation on some platforms."""
        wanted = (operation, frozenset(platforms))
        # A concurrent `put` replaces the dictionary, so no result without it is remembered.
        by_operation = self._by_operation
        if wanted not in by_operation:
            name = f'"operation":"{operation}"'
            by_operation[wanted] = {
                key: known for key, known in self.items() if key[0] in platforms and name in key[1]
            }
        return by_operation[wanted]

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def items(self) -> Iterator[tuple[Key, Known]]:
        return iter(tuple(self._known.items()))

    def clear(self) -> None:
        self._known.clear()
        self._by_operation = {}


memory_cache = ConfigCache()
