"""Reads published attention layers. The names of the arrays tell the form.

| form | query, key, value | output |
|---|---|---|
| Llama and most | `q_proj`, `k_proj`, `v_proj` | `o_proj`, or `dense` (Phi), `out_proj` (OPT) |
| LFM2 | the same, with `q_layernorm`, `k_layernorm` | `out_proj` |
| Phi-3 | `qkv_proj`: all queries, all keys, all values | `o_proj` |
| GPT-NeoX, Falcon | `query_key_value`: for each key head, its queries, its key, its value | `dense` |
| GPT-2 | `c_attn` `[in, out]`: all queries, all keys, all values | `c_proj` `[in, out]` |
| `torch.nn.MultiheadAttention` | `in_proj_weight`, or `q_proj_weight` ...; `in_proj_bias` | `out_proj` |
| ModernBERT | `Wqkv`: all queries, all keys, all values | `Wo` |
| BERT | `self.query`, `self.key`, `self.value` | `output.dense` |
| `equinox.nn.MultiheadAttention` | `query_proj`, `key_proj`, `value_proj` | `output_proj` |
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._errors import CheckpointError
from .fill import fill_fields, replaced
from .quantised.values import rows_of
from .view import Weights

_PARTS = ("q_proj", "k_proj", "v_proj")
_FUSED = ("qkv_proj.weight", "Wqkv.weight", "query_key_value.weight", "c_attn.weight", "in_proj_weight")
_EQUINOX = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}
_BERT = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value"}
_OUTPUTS = ("o_proj", "out_proj", "dense", "output_proj", "Wo", "output.dense")
_MASKS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # buffers beside the parameters
_Split = Callable[[Any], list[Any]]
"""From rows, arrays or a quantised weight, to those of queries, keys and values."""


def multi_head_attention(layer: Any, weights: Weights) -> Any:
    """Fills a `MultiHeadAttention` from any of the forms above."""
    taken, renamed = _query_key_value(layer, weights)
    # GPT-2 publishes its matrices as [in, out].
    if weights.has("c_proj.weight"):
        taken["o_proj"] = transposed(layer.o_proj, weights, "c_proj")
    else:
        renamed["o_proj"] = next((name for name in _OUTPUTS if weights.has(f"{name}.weight")), "o_proj")
    return fill_fields(replaced(layer, taken), weights, renamed, skip=tuple(taken))


def _query_key_value(layer: Any, weights: Weights) -> tuple[dict[str, Any], dict[str, str]]:
    """The projections that are published as one array, and the published names of the other arrays."""
    if (fused := next((name for name in _FUSED if weights.has(name)), None)) is not None:
        by_head, transposed = fused.startswith("query_key_value"), fused.startswith("c_attn")
        # GPT-NeoX and GPT-2 publish causal masks beside the parameters.
        if by_head or transposed:
            weights.skip(*_MASKS)
        split = _head_by_head(layer, weights) if by_head else _one_after_another(layer)
        return _fused(layer, weights, fused, split, transposed), {}
    if weights.has("q_proj_weight"):  # of PyTorch, where keys or values have a width of their own
        return _with_one_bias(layer, weights), {}
    if weights.has("self.query.weight"):
        return {}, dict(_BERT)
    if weights.has("q_layernorm.weight"):
        return {}, {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    return {}, dict(_EQUINOX) if weights.has("query_proj.weight") else {}


def _linears(layer: Any, weights: Weights, name: str) -> list[eqx.nn.Linear]:
    found = [getattr(layer, part) for part in _PARTS]
    if not all(type(linear) is eqx.nn.Linear for linear in found):
        raise CheckpointError(
            f"{weights.prefix + name!r} holds queries, keys and values in one: expected an equinox.nn.Linear for each of "
            f"{', '.join(_PARTS)}, received {', '.join(type(linear).__name__ for linear in found)}; load first, then replace them."
        )
    return found


def _fused(layer: Any, weights: Weights, weight: str, split: _Split, transposed: bool) -> dict[str, Any]:
    linears = _linears(layer, weights, weight)
    inputs = [linear.weight.shape[1] for linear in linears]
    if len(set(inputs)) > 1:
        raise CheckpointError(
            f"{weights.prefix + weight!r} holds queries, keys and values in one: expected projections of the same input, received inputs of "
            f"{inputs} features; build the layer without kv_embed_dim."
        )
    rows, columns = sum(linear.weight.shape[0] for linear in linears), inputs[0]
    shape = (columns, rows) if transposed else (rows, columns)
    # A quantised weight can be cut only into rows that follow each other.
    take = weights.take if transposed or weight.startswith("query_key_value") else weights.take_matrix
    found = take(weight, shape, linears[0].weight.dtype)
    matrices = split(found.T if transposed else found)
    return _with_bias(weights, linears, matrices, weight.replace("weight", "bias"), split)


def _with_one_bias(layer: Any, weights: Weights) -> dict[str, Any]:
    linears = _linears(layer, weights, "q_proj_weight")
    matrices = [
        weights.take(f"{name}_weight", linear.weight.shape, linear.weight.dtype)
        for name, linear in zip(_PARTS, linears)
    ]
    return _with_bias(weights, linears, matrices, "in_proj_bias", _one_after_another(layer))


def _with_bias(
    weights: Weights, linears: list[eqx.nn.Linear], matrices: list[Any], name: str, split: _Split
) -> dict[str, Any]:
    """The projections with these matrices. If they have biases, each gets its part of the one published bias."""
    new = [{"weight": matrix} for matrix in matrices]
    if (first := linears[0].bias) is not None:
        rows = sum(linear.weight.shape[0] for linear in linears)
        biases = split(weights.take(name, (rows,), first.dtype))
        new = [part | {"bias": bias} for part, bias in zip(new, biases)]
    return {name: replaced(linear, part) for name, linear, part in zip(_PARTS, linears, new)}


def _one_after_another(layer: Any) -> _Split:
    def split(rows: Any) -> list[Any]:
        # Sizes come from the arrays, as keys and values may have fewer heads than queries.
        q, k = layer.q_proj.weight.shape[0], layer.k_proj.weight.shape[0]
        return [rows_of(rows, part) for part in (slice(q), slice(q, q + k), slice(q + k, None))]

    return split


def _head_by_head(layer: Any, weights: Weights) -> _Split:
    heads, dim = layer.num_kv_heads, layer.head_dim
    if layer.output_gate:
        raise CheckpointError(
            f"{weights.prefix + 'query_key_value.weight'!r}: expected a layer without an output gate, as GPT-NeoX and Falcon, received one with it."
        )

    def split(rows: Any) -> list[Any]:
        # [K (H / K + 2) D, ...] to [K, (H / K + 2) D, ...]: the rows of a key head are those of its queries, its key, its value.
        apart = rows.reshape(heads, -1, *rows.shape[1:])
        parts = jnp.split(apart, [apart.shape[1] - 2 * dim, apart.shape[1] - dim], axis=1)
        return [part.reshape(-1, *rows.shape[1:]) for part in parts]

    return split


def transposed(linear: Any, weights: Weights, name: str) -> Any:
    """Fills a linear layer whose weight is published as `[in, out]`."""
    new = {"weight": weights.take(f"{name}.weight", linear.weight.shape[::-1], linear.weight.dtype).T}
    if linear.bias is not None:
        new["bias"] = weights.take(f"{name}.bias", linear.bias.shape, linear.bias.dtype)
    return replaced(linear, new)
