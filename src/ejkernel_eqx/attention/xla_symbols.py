"""Lengths that are symbols (`jax.export`): padded to whole tiles, with a list of tiles that is made when the exported function runs."""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._sizes import as_value, is_symbolic
from .spec import AttentionArrays, AttentionGrads, AttentionSpec

Lengths = tuple[Any, Any]
_FILL = {"q_segments": -1, "kv_segments": -1}


def lengths_of(arrays: AttentionArrays) -> Lengths:
    return arrays.q.shape[1], arrays.k.shape[1]


def has_symbols(arrays: AttentionArrays) -> bool:
    return any(map(is_symbolic, lengths_of(arrays)))


def forward(
    function: Callable[..., Any], arrays: AttentionArrays, spec: AttentionSpec, config: Any
) -> tuple[Array, Array]:
    """The forward of whole tiles, for any lengths."""
    queries = arrays.q.shape[1]
    whole, lengths = _whole(arrays, config.forward), lengths_of(arrays)
    out, lse = function(whole, spec, config, lengths)
    return out[:, :queries], lse[..., :queries]


def backward(
    function: Callable[..., Any],
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: Any,
    rows: tuple[Array, Array, Array, Array | None],
) -> AttentionGrads:
    """The backward of whole tiles, for any lengths. `rows` are `out, lse, dout, dlse`; a row of padding has no weights."""
    (out, lse, dout, dlse), tile = rows, config.backward
    queries, keys = lengths_of(arrays)
    whole = _whole(arrays, tile)
    rest = (
        _to_tiles(out, 1, tile.block_q),
        _to_tiles(lse, 2, tile.block_q, jnp.inf),
        _to_tiles(dout, 1, tile.block_q),
        None if dlse is None else _to_tiles(dlse, 2, tile.block_q),
    )
    grads = function(whole, spec, config, *rest, (queries, keys))
    bias = grads.bias
    if bias is not None and arrays.bias is not None:
        bias = bias[:, :, : arrays.bias.shape[2], : arrays.bias.shape[3]]
    return grads._replace(q=grads.q[:, :queries], k=grads.k[:, :keys], v=grads.v[:, :keys], bias=bias)


def _whole(arrays: AttentionArrays, tile: Any) -> AttentionArrays:
    q, s = tile.block_q, tile.block_k
    axes: dict[str, tuple[tuple[int, int], ...]] = {
        "q": ((1, q),),
        "k": ((1, s),),
        "v": ((1, s),),
        "bias": ((2, q), (3, s)),
        "mask": ((2, q), (3, s)),
        "q_segments": ((1, q),),
        "kv_segments": ((1, s),),
    }
    fields: dict[str, Any] = {}
    for name, sides in axes.items():
        x: Any = getattr(arrays, name)
        for axis, block in sides if x is not None else ():
            x = _to_tiles(cast(Array, x), axis, block, _FILL.get(name, 0))
        fields[name] = x
    if arrays.rows is not None:
        fields["rows"] = arrays.rows._make(_to_tiles(x, 1, q) for x in arrays.rows)
    return arrays._replace(**fields)


def _to_tiles(x: Array, axis: int, block: int, fill: Any = 0) -> Array:
    """Padded behind to whole blocks where the length is a symbol."""
    length = x.shape[axis]
    if not is_symbolic(length):
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -(-length // block) * block - length)
    return jnp.pad(x, widths, constant_values=np.asarray(fill, x.dtype))


def starts(length: Any, block: int) -> Array:
    """Where the tiles of a padded length start."""
    return jnp.arange(length // block, dtype=jnp.int32) * block


def pairs(q_start: Any, q_fresh: Any, k_start: Any, k_fresh: Any) -> Array:
    """int32 `[pairs, 4]`: every tile of queries with every tile of keys."""
    wide = lambda x: jnp.asarray(x, jnp.int32)
    columns = [wide(q_start)[:, None], wide(k_start)[None], wide(q_fresh)[:, None], wide(k_fresh)[None]]
    every = jnp.stack(jnp.broadcast_arrays(*columns), -1)
    return every.reshape(every.shape[0] * every.shape[1], 4)


def in_window(pair: Array, block_q: int, block_k: int, spec: AttentionSpec) -> Array | None:
    """Whether the static window leaves anything of a pair of tiles; `None` where there is no window."""
    offset, seen = as_value(spec.offset), None
    if spec.left is not None:
        seen = pair[1] + block_k - 1 >= pair[2] + offset - spec.left
    if spec.right is not None:
        right = pair[3] <= pair[0] + block_q - 1 + offset + spec.right
        seen = right if seen is None else seen & right
    return seen
