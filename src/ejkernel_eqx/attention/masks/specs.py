"""Splits the arrays of a `Mask` over the axes of a mesh."""

from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

M = TypeVar("M")  # `Mask`
AxisNames = str | tuple[str, ...] | None

# Axes after the leading ones, by field; of a pair of arrays, the first is for queries and the second for keys.
_PAIRS = ("segments", "types", "type_runs")


def mask_specs(mask: M, batch: Any, heads: Any, queries: Any, keys: Any) -> M:
    lead = tuple(batch) if isinstance(batch, PartitionSpec) else (batch,)
    _check_distinct((*lead, heads, queries, keys))

    def spec_of(path: Any, array: Any) -> PartitionSpec:
        # The innermost field, as masks may hold masks.
        field = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
        if field == "cu_seqlens":
            return PartitionSpec()
        if field in _PAIRS:
            axes = ((queries,), (keys,))[path[-1].idx]
        else:
            axes = {"dense": (heads, queries, keys), "block_map": (heads, None, None)}.get(field, ())
        leading = max(0, len(array.shape) - len(axes))
        if leading > len(lead) and (isinstance(batch, PartitionSpec) or lead != (None,)):
            raise ValueError(
                f"batch: expected a name for each of the {leading} leading axes of {field}, received {lead} for shape {array.shape}; "
                "pass jax.sharding.PartitionSpec(name, ...), with None for an axis that stays whole."
            )
        # Arrays broadcast from the right, so axes are named from there.
        names = (*(None,) * (leading - len(lead)), *lead, *axes)
        names = names[len(names) - array.ndim :]
        return PartitionSpec(
            *(None if size == 1 else name for size, name in zip(array.shape, names, strict=True))
        )

    return jax.tree_util.tree_map_with_path(spec_of, mask)


def _check_distinct(names: tuple[Any, ...]) -> None:
    flat = [n for entry in names for n in (entry if isinstance(entry, tuple) else (entry,)) if n is not None]
    for name in flat:
        if flat.count(name) > 1:
            raise ValueError(
                f"sharding_specs: expected each mesh axis at most once, received {name!r} twice among batch, heads, queries and keys."
            )
