"""Checks of command-line descriptions of a problem: sizes by letter, option flags by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._signatures import nearest

SWITCH = (False, True)


def read_sizes(dims: Mapping[str, int], defaults: Mapping[str, int | None]) -> dict[str, int]:
    """All sizes, completed by defaults; a default of `None` marks a required size."""
    unknown = sorted(set(dims) - set(defaults))
    missing = [name for name, default in defaults.items() if default is None and name not in dims]
    if unknown or missing:
        needed = ", ".join(name for name, default in defaults.items() if default is None)
        others = ", ".join(name for name, default in defaults.items() if default is not None)
        raise ValueError(
            f"dims: expected sizes for {needed} and optionally {others}, received unknown {unknown} and missing {missing}; "
            f"for example {_example(dims, defaults)}."
        )
    sizes = {name: size for name, size in {**defaults, **dims}.items() if size is not None}
    if any(size < 1 for size in sizes.values()):
        received = ", ".join(f"{name}={size}" for name, size in dims.items())
        raise ValueError(f"dims: expected positive sizes, received {received}.")
    return sizes


_USUAL = dict(B=1, T=4096, H=16, D=128, C=2048, I=2048, F=2048, M=4096, N=8, P=64, V=128)


def _example(dims: Mapping[str, int], defaults: Mapping[str, int | None]) -> str:
    """Returns what was given and can be used, completed."""
    sizes = {name: size for name, size in dims.items() if name in defaults}
    needed = [name for name, default in defaults.items() if default is None]
    example = {name: _USUAL.get(name, 64) for name in needed} | sizes
    return ",".join(f"{name}={size}" for name, size in example.items())


def read_flags(flags: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """All flags, each with one of its choices, the first of which is the default."""
    unknown = sorted(set(flags) - set(choices))
    if unknown:
        raise ValueError(
            f"flags: expected some of {', '.join(sorted(choices))}, received {', '.join(unknown)}{nearest(unknown[0], choices)}"
        )
    # The command line reads the word `none` as None.
    flags = {name: "none" if x is None and "none" in choices[name] else x for name, x in flags.items()}
    for name, value in flags.items():
        # `1 in SWITCH` would be true.
        known = [value is choice or (isinstance(choice, str) and value == choice) for choice in choices[name]]
        if not any(known):
            if set(choices[name]) == set(SWITCH):
                raise ValueError(f"flags: expected true or false for {name}, received {value!r}.")
            words = " or ".join(f"{name}={str(choice).lower()}" for choice in choices[name])
            raise ValueError(f"flags: expected {words}, received {value!r}.")
    return {name: flags.get(name, values[0]) for name, values in choices.items()}
