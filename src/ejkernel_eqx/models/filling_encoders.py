"""Fills an encoder with the arrays of a published model."""

from typing import Any, NamedTuple

from ..weights.fill import fill, fill_fields, replaced
from .filling import check_layers, filled_decoder, filled_stacks


class _Form(NamedTuple):
    """The names of a published encoder, besides those of a decoder."""

    embedding: str
    layers: str
    embedding_norm: str
    norm: str
    """The norm behind the last layer, whose number is `{}`."""
    of_layer: dict[str, str]


_BERT = _Form(
    "embeddings.word_embeddings.weight",
    "encoder.layer",
    "embeddings.LayerNorm",
    "encoder.layer.{}.output.LayerNorm",
    {"mixer": "attention", "mlp_norm": "attention.output.LayerNorm"},
)
_MODERN = _Form(
    "embeddings.tok_embeddings.weight",
    "layers",
    "embeddings.norm",
    "final_norm",
    {"mixer_norm": "attn_norm", "mixer": "attn", "mlp_norm": "mlp_norm", "mlp": "mlp"},
)
_HEADS = ("pooler.*", "cls.*", "lm_head.*", "head.*", "decoder.*", "classifier.*", "*.position_ids")


def filled_encoder(model: Any, weights: Any) -> Any:
    """The model with published weights, read a layer at a time, without its heads."""
    views = [weights, *(weights.at(root) for root in ("bert", "roberta", "model"))]
    places = ((view, form) for view in views for form in (_BERT, _MODERN) if view.has(form.embedding))
    view, form = next(places, (weights, None))
    if form is None:
        return replaced(model, {"body": filled_decoder(model.body, weights)})
    for part in (weights, view):
        part.skip(*_HEADS)
    body, count = model.body, model.body.num_layers
    check_layers(view, count, form.layers)

    def views_of(index: int) -> tuple[Any, ...]:
        """The views of a layer and of the norm before it. In BERT that is the last norm of the layer before."""
        before = form.norm.format(index - 1) if index else form.embedding_norm
        return view.at(f"{form.layers}.{index}"), view.at(before)

    def filled(layer: Any, own: Any, before: Any) -> Any:
        parts = {field: own.at(name) for field, name in form.of_layer.items()}
        parts = {"mixer_norm": before, "mlp": own} | parts
        return replaced(layer, {field: _filled(getattr(layer, field), part) for field, part in parts.items()})

    new = {"embedding": view.take(form.embedding, body.embedding.shape, body.embedding.dtype)}
    new |= {"norm": _filled(body.norm, view.at(form.norm.format(count - 1)))}
    body = replaced(body, new | {"stacks": filled_stacks(body, views_of, filled)})
    names = {"positions": "position_embeddings.weight", "token_types": "token_type_embeddings.weight"}
    tables = {field: table for field in names if (table := getattr(model, field)) is not None}
    take = lambda name, table: view.at("embeddings").take(name, table.shape, table.dtype)
    own = {field: take(names[field], table) for field, table in tables.items()}
    own |= {"embedding_norm": _filled(model.embedding_norm, view.at(form.embedding_norm))}
    return replaced(model, own | {"body": body})


def _filled(part: Any, view: Any) -> Any:
    """A norm. The first files of BERT call its weight gamma and its bias beta."""
    if part is None or not view.has("gamma"):
        return fill(part, view)
    return fill_fields(part, view, {"weight": "gamma", "bias": "beta"})
