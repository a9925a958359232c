"""Guesses from measurements close to a problem: at the nearest shape, or on the most similar device. Of a configuration, and of which of two
platforms is faster."""

import functools
import json
import math
from collections.abc import Iterable, Mapping

from .device import DeviceFacts
from .known import compared, Known, Table
from .platform import Platform
from .problem import Problem
from .registry import Implementation

MAX_DISTANCE = 2.0
"""In factors of two: measurements more than a factor of four away are not used."""
COMPARED_DISTANCE = 6.0
"""The same for which of two platforms is faster, which changes less with the sizes than the best configuration does."""

Index = Mapping[tuple[Platform, str], tuple[tuple[dict[str, int], Known], ...]]
"""Maps (platform, the key without its sizes) to sizes and what is known for them."""


def make_index(table: Table) -> Index:
    """The rows of a table with a configuration, by what must be equal for a guess."""
    index: dict[tuple[Platform, str], list[tuple[dict[str, int], Known]]] = {}
    for (platform, key), known in table.items():
        if known.config is not None:
            dims, rest = _split(key)
            index.setdefault((platform, rest), []).append((dims, known))
    return {group: tuple(members) for group, members in index.items()}


@functools.lru_cache(maxsize=16384)
def _split(key: str) -> tuple[dict[str, int], str]:
    try:
        body = json.loads(key)
        dims = body.pop("dims")
    except (ValueError, KeyError, AttributeError):  # not the key of a problem
        return {}, key
    return dims, json.dumps(body, sort_keys=True)


def nearest(
    index: Index, implementation: Implementation, problem: Problem, device: DeviceFacts
) -> Known | None:
    """The configuration measured at the nearest shape, adapted to this one, if it can run here. A pure function, the same in every process."""
    dims, rest = _split(problem.key())
    near = []
    for other, known in index.get((implementation.platform, rest), ()):
        away = distance(problem, dims, other)
        if away <= MAX_DISTANCE:
            near.append((away, sorted(other.items()), known))
    for away, sizes, known in sorted(near, key=lambda found: found[:2]):
        config = implementation.adapted(known.config, problem, device)
        if implementation.config_unsupported(config, problem, device) is None:
            source = f" ({known.origin})" if known.origin else ""
            origin = known.origin if away == 0 else f"from the nearest shape: {_shape(sizes)}{source}"
            return Known(config, (), origin)
    return None


def nearest_comparison(
    index: Index,
    implementations: tuple[Implementation, Implementation],
    problem: Problem,
    device: DeviceFacts,
    direction: str,
) -> tuple[tuple[float, str], str] | None:
    """The ratio of the first platform's time to the second's at the nearest shape at which both were timed, with configurations that can run
    here; its direction; and that shape."""
    dims, rest = _split(problem.key())
    mine, theirs = (
        {tuple(sorted(other.items())): known for other, known in index.get((i.platform, rest), ())}
        for i in implementations
    )
    near = sorted((distance(problem, dims, dict(sizes)), sizes) for sizes in mine.keys() & theirs.keys())
    for away, sizes in near:
        if away > COMPARED_DISTANCE:
            break
        pair = mine[sizes], theirs[sizes]
        runs = (
            i.config_unsupported(known.config, problem, device) is None
            for i, known in zip(implementations, pair)
        )
        found = compared(*pair, direction)
        if found is not None and all(runs):
            return found, _shape(sizes)
    return None


def _shape(sizes: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name}{size}" for name, size in sizes)


def distance(problem: Problem, dims: Mapping[str, int], other: Mapping[str, int]) -> float:
    """The distance of sizes from those of a problem, in factors of two: lengths count once, counts twice; infinite if any other size differs."""
    total = math.inf if dims.keys() != other.keys() else 0.0
    for name, size in dims.items() if not total else ():
        if size != other[name]:
            weight = 2.0 if name in problem.counts else 1.0 if name in problem.lengths else math.inf
            is_known = size > 0 and other[name] > 0
            total += weight * abs(math.log2(size / other[name])) if is_known else math.inf
    return total
