"""Token ids that a model does not have: known ones are refused, traced ones are found on request, and padding may have any."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MoEConfig

EXPERTS = MoEConfig({"hidden_dim": 4, "num_experts": 3, "top_k": 2})
MODEL: Any
PLAIN: Any
MODEL, PLAIN = (
    Decoder(DecoderConfig(50, 8, (LayerConfig("attention", {"num_heads": 2}, mlp),)), key=jax.random.key(0))
    for mlp in (EXPERTS, None)
)
TOKENS = jnp.arange(12).reshape(2, 6)
REFUSED = r"tokens: expected numbers from 0 to 49, .*received {}; use the tokenizer"


def changed(id: int) -> jax.Array:
    return TOKENS.at[1, 2].set(id)


def test_known_ones_are_refused_in_every_kind_of_call():
    serving = MODEL.init_serving_cache(num_pages=4, page_size=4, num_slots=2)
    batch = ejx.RaggedBatch.build([2, 4], [2, 4], [[0], [1]], page_size=4)
    calls = {
        50: MODEL,
        -1: lambda tokens: MODEL.features(tokens, return_statistics=True),
        51: lambda tokens: MODEL(tokens, MODEL.init_cache(2, 8)),
        10**9: lambda tokens: eqx.filter_grad(lambda model: model(tokens).sum())(MODEL),
        52: lambda tokens: MODEL(tokens[1], serving, batch=batch),
    }
    for id, call in calls.items():
        with pytest.raises(ValueError, match=REFUSED.format(id)):
            call(changed(id))


def test_traced_ones_are_found_on_request():
    call = eqx.filter_jit(lambda model, tokens: model(tokens))
    with ejx.check_values():
        with pytest.raises(Exception, match=REFUSED.format("other values .*")):
            jax.block_until_ready(call(PLAIN, changed(-1)))
        assert np.isfinite(call(PLAIN, TOKENS)).all()


def test_padding_has_any():
    """Its id is in no real token's logits, in no gradient, and is not checked, known or traced: what `generate` returns, with -1 behind a text,
    can be fed back with `padding_mask=tokens >= 0`."""
    real = jnp.ones((2, 6), bool).at[1, 4:].set(False)
    padded, other, first = (jnp.where(real, TOKENS, id) for id in (-1, 10**9, 0))

    def loss(model, tokens, rows):
        return jnp.sum(jnp.where(real[..., None], jnp.sin(model(tokens, **rows)), 0))

    take = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    mask, ids = {"padding_mask": real}, {"segment_ids": jnp.where(real, 3, -1)}
    for tokens, rows in ((padded, {"padding_mask": padded >= 0}), (other, ids)):
        eqx.filter_eval_shape(lambda rows, tokens=tokens: PLAIN(tokens, **rows), rows)
        eqx.filter_eval_shape(lambda tokens=tokens, rows=rows: PLAIN(tokens, **rows))
    with ejx.check_values():
        expected = take(PLAIN, first, mask)
        for tokens, rows in ((padded, mask), (other, mask)):
            jax.tree.map(
                np.testing.assert_array_equal, eqx.filter(take(PLAIN, tokens, rows), eqx.is_array), expected
            )


def test_what_says_which_are_padding_is_read_first():
    for rows, message in (
        (
            {"padding_mask": np.ones((2, 5), bool)},
            r"padding_mask: expected shape \(2, 6\), one entry per token",
        ),
        ({"padding_mask": np.ones((2, 6))}, "padding_mask: expected booleans"),
        ({"segment_ids": np.ones(6, int)}, r"segment_ids: expected shape \(2, 6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            MODEL(changed(-1), **rows)
    serving = MODEL.init_serving_cache(num_pages=4, page_size=4, num_slots=2)
    with pytest.raises(ValueError, match="batch: expected a RaggedBatch, received list"):
        MODEL(TOKENS[0], serving, batch=[2, 4])
