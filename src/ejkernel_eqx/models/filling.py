"""Fills a decoder with the arrays of a published model."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import CheckpointError
from ..quantised.dequantise import is_quantised
from ..weights.attention import transposed
from ..weights.experts import fused_mlp
from ..weights.fill import fill, is_parameter, placed_as, replaced, sharding_of
from ..weights.quantised.values import check_alike, empty_stack, rows_of

_ROOTS = ("model", "backbone", "model.language_model", "language_model.model", "transformer", "gpt_neox")
_ROOTS += ("model.decoder", "decoder")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embedding.weight", "embed_in.weight")
_EMBEDDINGS += ("wte.weight", "word_embeddings.weight")
_POSITIONS = ("wpe.weight", "embed_positions.weight")
_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")
_HEADS = ("lm_head", "embed_out")
_MIXERS = ("self_attn", "linear_attn", "mixer", "attn", "mamba", "attention", "conv", "self_attention")
_NORM_FIELDS = ("mixer_norm", "mixer_out_norm", "mlp_norm", "mlp_out_norm")
_NORM_NAMES = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "residual": ("input_layernorm", None, "post_attention_layernorm", None),
    "pre_mlp": (None, None, "post_attention_layernorm", None),
    "parallel": ("input_layernorm", None, None, None),
    "parallel_apart": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
_OTHER_NORMS = {
    "input_layernorm": (
        "operator_norm attention_layer_norm ln_1 self_attn_layer_norm ln_attn attention_layernorm norm".split()
    ),
    "post_attention_layernorm": (
        "pre_ff_layernorm ffn_norm feedforward_layer_norm ln_2 final_layer_norm ln_mlp feedforward_layernorm norm".split()
    ),
}
"""Names of the same norms in other families."""

_UPS = ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "intermediate.dense")
_DOWNS = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "output.dense")
_OWN_NAMES = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
)
"""Fields of a layer that are published by their names."""
_ADAPTERS = {
    "gate_up_proj": "feed_forward.gate_up_proj_adapter_list",
    "q_proj": "self_attn.linear_q_adapter_list",
    "k_proj": "self_attn.linear_k_adapter_list",
    "v_proj": "self_attn.linear_v_adapter_list",
}
"""Published names of the low-rank products of a layer, in the shared block."""
_GLM4_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


class _Outer(NamedTuple):
    """The names of the arrays outside of the layers, each with the view that has it."""

    views: list[Any]
    """Of all that may hold the head."""
    body: Any
    """That of the layers."""
    embedding: str
    norm: Any
    head: Any


def _outer(model: Any, weights: Any) -> _Outer:
    embedding_of = lambda view: next((name for name in _EMBEDDINGS if view.has(name)), None)
    views = [weights, *(weights.at(root) for root in _ROOTS)]
    body = next((view for view in views if embedding_of(view)), weights.at("model"))
    body.unit_offset_norms = model.config.unit_offset_norms
    places = ((view, name) for view in views for name in _HEADS if view.has(f"{name}.weight"))
    above, head = next(places, (weights, "lm_head"))
    norm = body.at(_first(body, _FINAL_NORMS))
    return _Outer(views, body, embedding_of(body) or _EMBEDDINGS[0], norm, above.at(head))


def parts_of(model: Any, weights: Any) -> Iterator[tuple[Any, Callable[..., Any], tuple[Any, ...]]]:
    """The parts of a model, one after the other. Each comes with the function that fills it and the views of its published arrays."""
    outer = _outer(model, weights)
    for name, read, view in _beside_layers(model, outer):
        yield getattr(model, name), read, (view,)
    views = _views_of_layers(model, outer.body)
    for index in range(model.num_layers):
        yield model.layer(index), filled_layer, views(index)
    for number, block in enumerate(model.shared_blocks):
        yield block, fill, (_views_of_block(model, outer.body, number)[0],)


def _beside_layers(model: Any, outer: _Outer) -> list[tuple[str, Callable[..., Any], Any]]:
    """The fields of a model that are beside the layers and there, each with the function that fills it and its view."""
    body = outer.body
    take = lambda like, view: placed_as(view.take(outer.embedding, like.shape, like.dtype), like)
    parts = [("embedding", take, body), ("positions", _filled_positions, body)]
    parts += [("layer_embedding", fill, body), ("norm", fill, outer.norm), ("head", fill, outer.head)]
    return [part for part in parts if getattr(model, part[0]) is not None]


def filled_decoder(model: Any, weights: Any) -> Any:
    """The model with published weights, read a layer at a time."""
    outer = _outer(model, weights)
    new: dict[str, Any] = {
        name: read(getattr(model, name), view) for name, read, view in _beside_layers(model, outer)
    }
    if model.head is None:
        for view in outer.views:
            _check_tied(view, new["embedding"])
    body, name = outer.body, _layers_of(outer.body)
    check_layers(body, 1 + max(max(both) for both in _blocks(body, model.config.layers)), name)
    new["shared_blocks"] = tuple(
        _filled_block(block, _views_of_block(model, body, number))
        for number, block in enumerate(model.shared_blocks)
    )
    new["stacks"] = filled_stacks(model, _views_of_layers(model, body), filled_layer)
    return replaced(model, new)


def _views_of_layers(model: Any, body: Any) -> Callable[[int], tuple[Any, ...]]:
    """From the number of a layer to the views that `filled_layer` takes."""
    name, layers = _layers_of(body), model.config.layers
    blocks, at = _blocks(body, layers), lambda block: body.at(f"{name}.{block}")
    sharing = [index for index, layer in enumerate(layers) if layer.shared_block is not None]

    def views(index: int) -> tuple[Any, ...]:
        of_block = []
        if index in sharing:  # what all layers of a block have of it stands in the first
            first = _views_of_block(model, body, layers[index].shared_block)[0]
            of_block = [first.at(f"{beside}.{sharing.index(index)}") for beside in _ADAPTERS.values()]
        return *map(at, blocks[index]), *of_block

    return views


def _views_of_block(model: Any, body: Any, number: int) -> list[Any]:
    """Those of a shared block in each of its layers; most files have the first alone."""
    indices = [i for i, layer in enumerate(model.config.layers) if layer.shared_block == number]
    return [body.at(f"layers.{index}.shared_transformer") for index in indices]


def _filled_block(block: Any, views: list[Any]) -> Any:
    new = fill(block, views[0])
    for view in views[1:]:
        if view.names() and not eqx.tree_equal(fill(block, view), new):
            raise CheckpointError(
                f"{view.prefix!r}: expected the weights of {views[0].prefix!r}, as layers share this block, received others; "
                "the model was trained with blocks that are not shared, for which there is no Decoder."
            )
        view.skip("*_adapter_list.*")
    return new


def _layers_of(body: Any) -> str:
    return _first(body, ("layers", "h"))


def _filled_positions(table: Any, body: Any) -> Any:
    name = next((name for name in _POSITIONS if body.has(name)), _POSITIONS[0])
    unused = 2 if name == "embed_positions.weight" else 0  # OPT's first rows, of padding
    rows, width = table.shape
    return placed_as(body.take(name, (rows + unused, width), table.dtype)[unused:], table)


def filled_stacks(model: Any, views_of: Callable[[int], tuple[Any, ...]], filled: Callable[..., Any]) -> Any:
    """The stacks of the model. Each layer is filled from its own views."""
    stacks = []
    for (first, period, repeats), stack in zip(model.config.stacks(), model.stacks):
        one = lambda place, first=first, period=period, repeats=repeats, stack=stack: _stacked(
            stack[place], [views_of(first + place + period * i) for i in range(repeats)], filled
        )
        stacks.append(tuple(one(place) for place in range(period)))
    return tuple(stacks)


def _blocks(body: Any, layers: Any) -> list[tuple[int, int]]:
    """The published indices of the mixer and of the MLP of each layer. In Nemotron-H they differ: each is a block of its own."""
    apart, blocks, count = body.has("layers.0.norm.weight"), [], 0
    for layer in layers:
        last = count + (apart and layer.mlp is not None)
        blocks.append((count, last))
        count = last + 1
    return blocks


def check_layers(body: Any, count: int, name: str = "layers") -> None:
    """Raises for missing layers, before arrays for all layers are made."""
    start = len(name) + 1
    held = {n[start:].partition(".")[0] for n in body.names() if n.startswith(f"{name}.")}
    absent = [index for index in range(count) if str(index) not in held]
    if held and absent:
        raise CheckpointError(
            f"{body.prefix + name!r}: expected the weights of {count} layers (num_hidden_layers), received those of {len(held)}; layer "
            f"{absent[0]} has none. Download all files of the model, or correct its config.json."
        )


def _check_tied(view: Any, embedding: Any) -> None:
    """Some checkpoints hold a tied head a second time. One that differs from the embedding is refused, since it would be lost."""
    if not view.has("lm_head.weight"):
        return
    head = view.take("lm_head.weight", embedding.shape, embedding.dtype)
    if not bool(jnp.array_equal(placed_as(head, embedding), embedding)):
        raise CheckpointError(
            f"{view.prefix + 'lm_head.weight'!r}: expected the same weights as the embedding, since the configuration says "
            'tie_word_embeddings, received others. Write "tie_word_embeddings": false in its config.json to load both.'
        )


def _first(view: Any, names: tuple[str, ...]) -> str:
    """The first of these submodules that the checkpoint has."""
    found = view.names()
    return next((name for name in names if any(n.startswith(f"{name}.") for n in found)), names[0])


def _stacked(layers: Any, views: list[tuple[Any, ...]], filled: Callable[..., Any]) -> Any:
    """A stack of layers. They are filled one after the other, into arrays that are written in place."""
    parameters, rest = eqx.partition(layers, is_parameter)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parameters)
    buffers, is_loaded = None, lambda leaf: is_parameter(leaf) or is_quantised(leaf)
    for index, view in enumerate(views):
        layer = eqx.filter(filled(eqx.combine(one, rest), *view), is_loaded, is_leaf=is_quantised)
        if buffers is None:
            # The arrays are made with their sharding, so that no device holds more than its part of a stack.
            empty = lambda x, like: empty_stack(len(views), x, sharding_of(like))
            buffers = jax.tree.map(empty, layer, parameters, is_leaf=is_quantised)
        check_alike(buffers, layer, view[0].prefix)
        buffers = _written(jnp.int32(index), jax.tree.map(_beside, layer, buffers), buffers)
    one_of = lambda buffer, other: other if buffer is None else buffer
    return jax.tree.map(one_of, buffers, rest, is_leaf=lambda x: x is None or is_quantised(x))


def _beside(x: jax.Array, buffer: jax.Array) -> jax.Array:
    sharding = buffer.sharding
    if not isinstance(sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])))


@eqx.filter_jit(donate="all-except-first")
def _written(index: Any, layer: Any, buffers: Any) -> Any:
    return jax.tree.map(lambda x, buffer: buffer.at[index].set(x), layer, buffers)


def filled_layer(layer: Any, view: Any, of_mlp: Any, *of_adapters: Any) -> Any:
    """A layer filled from `view`. `of_mlp` is the view of the MLP and its norms, where that is a block of its own. `of_adapters` are the views of
    the names in `_ADAPTERS`."""
    if of_adapters:
        own, views = layer.block_adapters, dict(zip(_ADAPTERS, of_adapters))
        beside = {name: fill(low, views[name]) for name, low in own.beside.items()}
        own = replaced(own, {"linear": fill(own.linear, view.at("linear")), "beside": beside})
        layer = replaced(layer, {"block_adapters": own})
        view = of_mlp = view.at("mamba_decoder")
    names = _NORM_NAMES[layer.config.norms]
    if view.has("post_self_attn_layernorm.weight"):
        names = _GLM4_NORMS
    mlp = _first(of_mlp, ("mlp", "block_sparse_moe", "shared_mlp", "feed_forward", "mixer"))
    mlp = "" if view.has("fc1.weight") else mlp  # OPT's projections stand in the layer
    mixers = [name for name in _MIXERS if any(n.startswith(f"{name}.") for n in view.names())]
    mixer, beside, *_ = (*mixers, _MIXERS[0], None) if len(mixers) < 2 else mixers
    fields = dict(zip(_NORM_FIELDS, names)) | {"mixer": mixer, "beside": beside, "mlp": mlp}
    fields |= {name: name for name in _OWN_NAMES}
    there = [
        field for field, name in fields.items() if name is not None and getattr(layer, field) is not None
    ]
    views = {field: of_mlp if field.startswith("mlp") else view for field in there}
    place = lambda field: _first(views[field], (fields[field], *_OTHER_NORMS.get(fields[field], ())))
    at = lambda field: views[field].at(place(field)) if fields[field] else views[field]
    new = [fill(getattr(layer, field), at(field)) for field in there]
    if layer.experts is not None:  # whose parts stand beside the others
        there.append("experts")
        new.append(fill(layer.experts, view))
    if (scalar := layer.layer_scalar) is not None:
        there.append("layer_scalar")
        new.append(view.take("layer_scalar", scalar.shape, scalar.dtype))
    return eqx.tree_at(lambda m: [getattr(m, field) for field in there], layer, new)


def filled_mlp(mlp: Any, weights: Any) -> Any:
    """An MLP. Its gate and up projections may be published as one array, and an MLP as a mixture of one expert."""
    if mlp.gate_proj is None:
        is_turned = weights.beside("attn").has("c_attn.weight")  # GPT-2 keeps [in, out]
        filled = lambda linear, name: (
            transposed(linear, weights, name) if is_turned else fill(linear, weights.at(name))
        )
        new = [filled(mlp.up_proj, _first(weights, _UPS)), filled(mlp.down_proj, _first(weights, _DOWNS))]
        if mlp.act_fn is not None:
            new.append(fill(mlp.act_fn, weights.at("act_fn")))
        where = lambda m: [m.up_proj, m.down_proj, m.act_fn][: len(new)]
        return eqx.tree_at(where, mlp, new)
    if weights.has("input_linear.weight"):
        return fused_mlp(mlp, weights)
    experts = any(name.startswith("experts.") for name in weights.names())
    if experts:
        weights.skip("gate.weight", "router.weight", "router.bias")  # which has one to choose from
    if weights.has("gate_up_proj.weight") or weights.has("experts.gate_up_proj"):
        return _filled_fused(mlp, weights, experts)
    if weights.has("Wi.weight"):  # ModernBERT
        return _filled_fused(mlp, weights, False, ("Wi", "Wo"))
    names = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
    if weights.has("w1.weight"):  # LFM2
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    if experts:  # MiniMax, in files
        names = {"gate_proj": "experts.0.w1", "up_proj": "experts.0.w3", "down_proj": "experts.0.w2"}
    new = [fill(getattr(mlp, field), weights.at(name)) for field, name in names.items()]
    return eqx.tree_at(lambda m: [getattr(m, field) for field in names], mlp, new)


def _filled_fused(
    mlp: Any, weights: Any, experts: bool, names: tuple[str, str] = ("gate_up_proj", "down_proj")
) -> Any:
    # GPT-OSS keeps [in, out], with the features of gate and up in turn.
    turned = mlp.config.activation == "clamped_swiglu"

    def take(name: str, kind: str, shape: tuple[int, ...]) -> Any:
        dtype = getattr(mlp.down_proj, kind).dtype
        if not experts:
            take = weights.take_matrix if kind == "weight" else weights.take
            return take(f"{name}.{kind}", shape, dtype)
        full = f"experts.{name}{'_bias' if kind == 'bias' else ''}"
        x = weights.take(full, (1, *(shape[::-1] if turned else shape)), dtype)[0]
        return x.T if turned else x

    outer, inner = mlp.down_proj.weight.shape
    for kind in ("weight", "bias") if mlp.config.use_bias else ("weight",):
        columns = lambda size, kind=kind: (size,) if kind == "weight" else ()
        both = take(names[0], kind, (2 * inner, *columns(outer)))
        rows = (slice(0, None, 2), slice(1, None, 2)) if turned else (slice(inner), slice(inner, None))
        gate, up = (rows_of(both, part) for part in rows)
        down = take(names[1], kind, (outer, *columns(inner)))
        where = lambda m, kind=kind: [getattr(p, kind) for p in (m.gate_proj, m.up_proj, m.down_proj)]
        mlp = eqx.tree_at(where, mlp, [gate, up, down])
    return mlp
