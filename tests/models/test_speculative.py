"""Texts with speculation are those without, whoever drafts; good drafts save calls of the model."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models import (
    Decoder,
    DecoderConfig,
    generate,
    LayerConfig,
    MLPConfig,
    Sampling,
    Speculation,
)
from ejkernel_eqx.models.speculative import looked_up
from tests.models.test_generate import ATTENTION, MAMBA, PROMPTS

DELTA = LayerConfig("gated_delta_net", {"num_k_heads": 2, "head_dim": 8}, MLPConfig(24))
LATENT = LayerConfig(
    "latent_attention",
    {"num_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
)
KINDS = {
    "attention": (ATTENTION, ATTENTION),
    "delta": (ATTENTION, DELTA),
    "mamba": (MAMBA, ATTENTION),
    "latent": (LATENT,),
}


@functools.cache
def model_of(kind: str, seed: int = 5) -> Decoder:
    """With large weights: texts depend on all that was before, and do not repeat themselves at once."""
    model = Decoder(DecoderConfig(20, 16, KINDS[kind]), key=jax.random.key(seed))
    large = jax.tree.map(lambda x: 4 * x if eqx.is_array(x) and x.ndim == 3 else x, model.stacks)
    return eqx.tree_at(lambda m: m.stacks, model, large)


def equal(model: Decoder, drafts: tuple[Decoder | None, ...], **options: Any) -> list[list[int]]:
    """With each of the drafts the result is that without; for each, how many tokens there are after every 16 steps."""
    expected, every = generate(model, PROMPTS, **options), []
    for draft in drafts:
        told: list[int] = []
        speculate = Speculation(draft, num_draft_tokens=3)
        tell = lambda count, most, told=told: told.append(count)
        found = generate(model, PROMPTS, **options, speculate=speculate, progress=tell)
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other)
        every.append(told)
    return every


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["attention", *(pytest.param(kind, marks=slow) for kind in ("delta", "mamba"))]
)
def test_a_draft_model_changes_no_token(kind):
    """The model itself, all of whose drafts are right, and one that knows nothing."""
    model, other = model_of(kind), model_of(kind, 6)
    good, bad = equal(model, (model, other), max_new_tokens=60, stop_tokens=())
    assert good == [1, 60] and bad[1] < 40 and bad[-1] == 60


@slow
@pytest.mark.parametrize("kind", ["attention", "delta", "mamba"])
def test_rows_that_end_in_the_middle_of_a_step(kind):
    model, other = model_of(kind), model_of(kind, 6)
    row = generate(model, PROMPTS, max_new_tokens=9, stop_tokens=()).texts()[1]
    equal(model, (model, other), max_new_tokens=60, stop_tokens=[row[5]])


@slow
@pytest.mark.parametrize("kind", ["attention", "delta", "mamba"])
def test_a_draft_model_changes_no_drawn_token(kind):
    model, other = model_of(kind), model_of(kind, 6)
    sampling = Sampling(1.5, top_k=9, seed=3)
    good, bad = equal(model, (model, other), max_new_tokens=60, stop_tokens=(), sampling=sampling)
    assert good == [1, 60] and 17 <= bad[1] < 60


@pytest.mark.parametrize(
    "kind", ["attention", *(pytest.param(kind, marks=slow) for kind in ("delta", "mamba", "latent"))]
)
def test_drafts_of_the_text_change_no_token(kind):
    model = model_of(kind)
    (greedy,) = equal(model, (None,), max_new_tokens=100, stop_tokens=())
    # A greedy text of a small model soon repeats itself.
    assert greedy[1] > 17
    equal(model, (None,), max_new_tokens=1)


@slow
@pytest.mark.parametrize("kind", ["attention", "delta", "mamba", "latent"])
def test_drafts_of_the_text_change_no_drawn_token(kind):
    equal(model_of(kind), (None,), max_new_tokens=100, stop_tokens=(), sampling=Sampling(0.8, seed=1))


@slow
def test_a_smaller_draft_model_of_another_kind():
    equal(model_of("attention"), (model_of("mamba"),), max_new_tokens=30)


@slow
def test_rows_with_nan_end_and_are_reported():
    """The token 7 has a broken embedding: the row that reads it ends, and one that drafts it may end before it. Others go on."""
    model = Decoder(DecoderConfig(20, 16, KINDS["attention"]), key=jax.random.key(5))
    broken = eqx.tree_at(lambda m: m.embedding, model, model.embedding.at[7].set(jnp.nan))
    prompts, options = [[1, 2, 3], [1, 7, 3], [2]], {"max_new_tokens": 60, "stop_tokens": ()}
    for draft in (None, model):
        with pytest.warns(RuntimeWarning, match=r"generate: the logits of rows \[1\] are not finite"):
            found = generate(broken, prompts, **options, speculate=Speculation(draft))
        assert found.lengths.tolist() == [60, 0, 60] and found.finite.tolist() == [True, False, True]
        assert found.texts()[0] == generate(model, prompts, **options).texts()[0]
        drawn: Any = {**options, "sampling": Sampling(2.0, seed=1)}
        with pytest.warns(RuntimeWarning, match=r"are not finite"):
            found = generate(broken, prompts, **drawn, speculate=Speculation(draft))
        with pytest.warns(RuntimeWarning, match=r"are not finite"):
            expected = generate(broken, prompts, **drawn)
        np.testing.assert_array_equal(found.finite, expected.finite)
        assert np.any(found.lengths > 0) and np.all(found.lengths <= expected.lengths)
        for one, other in zip(found.texts(), expected.texts()):
            assert one == other[: len(one)]


@slow
def test_a_whole_generation_may_be_jitted():
    model, prompt = model_of("attention"), jnp.asarray([3, 1, 4])
    speculate = Speculation(model, num_draft_tokens=1)
    run = lambda model, prompt: generate(model, prompt, max_new_tokens=9, speculate=speculate).tokens
    expected = generate(model, prompt, max_new_tokens=9).tokens
    assert eqx.filter_jit(run)(model, prompt).tolist() == expected.tolist()


def test_no_rows_have_no_tokens():
    prompts, speculate = jnp.zeros((0, 3), int), Speculation()
    assert generate(model_of("attention"), prompts, max_new_tokens=3, speculate=speculate).tokens.shape == (
        0,
        3,
    )


def by_hand(text: list[int], count: int, most: int) -> list[int]:
    """The definition, one place after the other."""
    for size in range(min(most, len(text) - 1), -1, -1):
        for end in range(len(text) - 1, 0, -1):
            if end >= size and text[end - size : end] == text[len(text) - size :]:
                text = [*text]
                for ahead in range(count):
                    text.append(text[end + ahead])
                return text[-count:]
    raise AssertionError


def test_drafts_of_the_text_are_what_followed_the_longest_match():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, n).tolist() for n in (2, 2, 3, 5, 8, 13, 20, 20, 19, 18)]
    texts += [[1, 2, 3, 4, 1, 2, 3, 5, 2, 3], [7] * 6, [1, 2, 1, 2, 1]]
    room = np.full((len(texts), 24), 1)
    for row, text in zip(room, texts):
        row[: len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    for count, most in ((1, 1), (4, 3), (6, 9)):
        found = jax.jit(looked_up, static_argnums=(2, 3))(jnp.asarray(room, jnp.int32), lengths, count, most)
        assert found.tolist() == [by_hand(text, count, most) for text in texts]


ANY: Any = Speculation
GENERATE: Any = generate


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_speculate_is_refused():
    model = model_of("attention")
    small = Decoder(DecoderConfig(19, 16, KINDS["attention"]), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"draft: expected an ejx\.models\.Decoder or None, received int"):
        ANY(3)
    with pytest.raises(ValueError, match=r"num_draft_tokens: .* integer, received 0; pass 1 or more"):
        ANY(num_draft_tokens=0)
    with pytest.raises(ValueError, match=r"max_ngram: .* integer, received 1\.5"):
        ANY(max_ngram=1.5)
    with pytest.raises(TypeError, match=r"Speculation: expected .*'num_drafts'; did you mean num_draft"):
        ANY(num_drafts=3)
    with pytest.raises(
        ValueError, match="speculate: expected a draft model with the vocabulary of the model, 20"
    ):
        generate(model, [[1]], max_new_tokens=2, speculate=Speculation(small))
    with pytest.raises(
        ValueError, match=r"speculate: expected a Speculation, received Decoder; Speculation\(\)"
    ):
        GENERATE(model, [[1]], max_new_tokens=2, speculate=small)
    with pytest.raises(TypeError, match=r"'max_ngram'; write speculate=Speculation\(max_ngram=...\)"):
        GENERATE(model, [[1]], max_new_tokens=2, max_ngram=2)
