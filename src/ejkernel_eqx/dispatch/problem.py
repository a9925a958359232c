"""`Problem`: everything that may influence the choice of a kernel, as host metadata."""

import dataclasses
import hashlib
import json
from typing import Any

from .._shapes import is_symbolic

REPRESENTATIVE = 4096
"""Stands for a symbolic size when a function is exported: configurations are chosen as for this size."""

Number = int | float | None
Flag = bool | Number | str | tuple[Number, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of one operation on one device: sizes, dtypes, option flags. Never an array, a tracer or a sharding.

    `dims` are the per-device sizes by letter. Those named in `lengths` (tokens, batch) are rounded up to a power of two
    in the key, so that neighbouring lengths share one tuned entry. Those named in `counts` (heads) only repeat the
    work, so measurements for another count are a good guess. The flags named in `requirements` describe what a platform
    must support; they do not affect its kernels and are not part of the key. Symbolic sizes (`jax.export`) are named in
    `symbolic`, and `REPRESENTATIVE` stands for each.
    """

    operation: str
    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, Flag], ...] = ()
    lengths: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset()
    requirements: frozenset[str] = frozenset()
    symbolic: frozenset[str] = frozenset()

    @classmethod
    def make(
        cls,
        operation: str,
        *,
        dims: dict[str, Any],
        dtypes: dict[str, Any],
        flags: dict[str, Flag],
        lengths: set[str],
        counts: "set[str] | frozenset[str]" = frozenset(),
        requirements: "set[str] | frozenset[str]" = frozenset(),
        symbolic: "set[str] | frozenset[str]" = frozenset(),
    ) -> "Problem":
        """Sorts everything, so that equal problems are equal objects."""
        symbols = {name for name, size in dims.items() if not isinstance(size, int) and is_symbolic(size)}
        dims = {name: REPRESENTATIVE if name in symbols else size for name, size in dims.items()}
        # JSON has no tuples.
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in flags.items()}
        return cls(
            operation,
            tuple(sorted(dims.items())),
            tuple(sorted([(name, str(dtype)) for name, dtype in dtypes.items()])),
            tuple(sorted(values.items())),
            frozenset(lengths),
            frozenset(counts),
            frozenset(requirements),
            frozenset(symbols | set(symbolic)),
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Problem":
        """The inverse of `to_dict`."""
        return cls.make(
            data["operation"],
            dims=data["dims"],
            dtypes=data["dtypes"],
            flags=data["flags"],
            lengths=set(data["lengths"]),
            counts=set(data["counts"]),
            requirements=set(data["requirements"]),
            symbolic=set(data.get("symbolic", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-compatible values; sizes are not rounded."""
        return {
            "operation": self.operation,
            "dims": dict(self.dims),
            "dtypes": dict(self.dtypes),
            "flags": {name: list(v) if isinstance(v, tuple) else v for name, v in self.flags},
            "lengths": sorted(self.lengths),
            "counts": sorted(self.counts),
            "requirements": sorted(self.requirements),
            **({"symbolic": sorted(self.symbolic)} if self.symbolic else {}),
        }

    def dim(self, name: str) -> int:
        return dict(self.dims)[name]

    def dtype(self, name: str) -> str:
        return dict(self.dtypes)[name]

    def flag(self, name: str) -> Flag:
        """The flag's value, or `None` if it was not given."""
        return dict(self.flags).get(name)

    def key(self) -> str:
        """Canonical JSON of the bucketed problem, the same in every process."""
        bucket = lambda size: 1 << (size - 1).bit_length() if size > 0 else 0
        body = {
            "operation": self.operation,
            "dims": {name: bucket(size) if name in self.lengths else size for name, size in self.dims},
            "dtypes": dict(self.dtypes),
            "flags": {name: value for name, value in self.flags if name not in self.requirements},
            **({"symbolic": sorted(self.symbolic)} if self.symbolic else {}),
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        return hashlib.sha256(self.key().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}{'*' if name in self.symbolic else size}" for name, size in self.dims)
        dtypes = "/".join(dict.fromkeys(dtype for _, dtype in self.dtypes))
        flags = " ".join(
            name if value is True else f"{name}={_shown(value)}"
            for name, value in self.flags
            if value not in (False, None)
        )
        return " ".join(part for part in (self.operation, sizes, dtypes, flags) if part)


def _shown(value: Flag) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
