"""Where the arrays of a published model go in a decoder."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..weights.fill import fill

_ROOTS = ("model", "backbone", "model.language_model", "language_model.model", "transformer")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embedding.weight")
_FINAL_NORMS = ("norm", "norm_f")
_MIXERS = ("self_attn", "linear_attn", "mixer", "attn")
_NORM_NAMES = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "residual": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def filled_decoder(model: Any, weights: Any) -> Any:
    """The model with published weights, read a layer at a time."""
    embedding_of = lambda view: next((name for name in _EMBEDDINGS if view.has(name)), None)
    views = [weights, *(weights.at(root) for root in _ROOTS)]
    body = next((view for view in views if embedding_of(view)), weights.at("model"))
    body.unit_offset_norms = model.config.unit_offset_norms
    table = model.embedding
    embedding = body.take(embedding_of(body) or _EMBEDDINGS[0], table.shape, table.dtype)
    norm = fill(model.norm, body.at(_first(body, _FINAL_NORMS)))
    head = model.head
    if head is not None:
        above = next((view for view in views if view.has("lm_head.weight")), weights)
        head = fill(head, above.at("lm_head"))
    else:
        for view in views:
            view.skip("lm_head.weight")  # some checkpoints hold it twice
    stacks = []
    for (first, period, repeats), stack in zip(model.config.stacks(), model.stacks):
        one = lambda place, first=first, period=period, repeats=repeats, stack=stack: _stacked(
            stack[place], [body.at(f"layers.{first + place + period * i}") for i in range(repeats)]
        )
        stacks.append(tuple(one(place) for place in range(period)))
    where = lambda m: (m.embedding, m.norm, m.head, m.stacks)
    return eqx.tree_at(
        where, model, (embedding, norm, head, tuple(stacks)), is_leaf=lambda leaf: leaf is None
    )


def _first(view: Any, names: tuple[str, ...]) -> str:
    """Which of several submodules a checkpoint has."""
    found = view.names()
    return next((name for name in names if any(n.startswith(f"{name}.") for n in found)), names[0])


def _stacked(layers: Any, views: list[Any]) -> Any:
    """A stack of layers, filled one after the other into arrays that are written in place."""
    is_parameter = lambda x: (
        eqx.is_inexact_array(x)
        or (isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact))
    )
    parameters, rest = eqx.partition(layers, is_parameter)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parameters)
    buffers = None
    for index, view in enumerate(views):
        layer = eqx.filter(_filled_layer(eqx.combine(one, rest), view), is_parameter)
        if buffers is None:
            buffers = jax.tree.map(lambda x: jnp.zeros((len(views), *x.shape), x.dtype), layer)
        buffers = _put((layer, jnp.int32(index)), buffers)
    return eqx.combine(buffers, rest)


@eqx.filter_jit(donate="all-except-first")
def _put(layer_and_index: Any, buffers: Any) -> Any:
    layer, index = layer_and_index
    return jax.tree.map(lambda buffer, x: buffer.at[index].set(x), buffers, layer)


def _filled_layer(layer: Any, view: Any) -> Any:
    mamba = layer.mlp is None
    before, behind, mlp_before, mlp_behind = (
        ("norm", None, None, None) if mamba else _NORM_NAMES[layer.config.norms]
    )
    fields = {
        "mixer_norm": before,
        "mixer": _first(view, _MIXERS),
        "mixer_out_norm": behind,
        "mlp_norm": mlp_before,
        "mlp": _first(view, ("mlp", "block_sparse_moe")),
        "mlp_out_norm": mlp_behind,
    }
    there = {
        field: name
        for field, name in fields.items()
        if name is not None and getattr(layer, field) is not None
    }
    new = [fill(getattr(layer, field), view.at(name)) for field, name in there.items()]
    return eqx.tree_at(lambda m: [getattr(m, field) for field in there], layer, new)


def filled_mlp(mlp: Any, weights: Any) -> Any:
    """Gate and up projection may be one array; a mixture of one expert is that expert."""
    if weights.has("gate_up_proj.weight"):  # Phi-3
        return _split(
            mlp, weights, "gate_up_proj.weight", "down_proj.weight", lambda x: jnp.split(x, 2), lambda x: x
        )
    if weights.has("experts.gate_up_proj"):
        weights.skip("gate.weight", "router.weight", "router.bias")  # which has one to choose from
        if mlp.config.activation == "clamped_swiglu":  # GPT-OSS: [1, E, 2 F], rows of gate and up in turn
            rows = lambda x: (x[0].T[::2], x[0].T[1::2]) if x.ndim == 3 else (x[0, ::2], x[0, 1::2])
            return _split(
                mlp,
                weights,
                "experts.gate_up_proj",
                "experts.down_proj",
                rows,
                lambda x: x[0].T if x.ndim == 3 else x[0],
            )
        return _split(
            mlp,
            weights,
            "experts.gate_up_proj",
            "experts.down_proj",
            lambda x: jnp.split(x[0], 2),
            lambda x: x[0],
        )
    return eqx.tree_at(
        lambda m: [m.gate_proj, m.up_proj, m.down_proj],
        mlp,
        [fill(getattr(mlp, name), weights.at(name)) for name in ("gate_proj", "up_proj", "down_proj")],
    )


def _split(mlp: Any, weights: Any, both: str, down: str, split: Any, whole: Any) -> Any:
    transposed = mlp.config.activation == "clamped_swiglu"
    inner, outer = mlp.gate_proj.weight.shape
    one = (1,) if both.startswith("experts") else ()
    turned = lambda a, b: (*one, b, a) if transposed else (*one, a, b)
    dtype = mlp.gate_proj.weight.dtype
    gate, up = split(weights.take(both, turned(2 * inner, outer), dtype))
    new = [gate, up, whole(weights.take(down, turned(outer, inner), dtype))]
    places = lambda m: [m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight]
    mlp = eqx.tree_at(places, mlp, new)
    if not mlp.config.use_bias:
        return mlp
    gate, up = split(weights.take(f"{both}_bias", (*one, 2 * inner), dtype))
    new = [gate, up, whole(weights.take(f"{down}_bias", (*one, outer), dtype))]
    return eqx.tree_at(lambda m: [m.gate_proj.bias, m.up_proj.bias, m.down_proj.bias], mlp, new)
