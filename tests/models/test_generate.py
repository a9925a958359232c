"""Texts continued with caches are those of whole passes, and draws follow the probabilities."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import Backend
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, Sampling, Speculation
from ejkernel_eqx.models.prompts import capacity_of
from tests.compilations import compilations

generate = ejx.models.generate
ATTENTION = LayerConfig(
    "attention", {"num_heads": 2, "rope": ejx.nn.RotaryEmbedding(8), "sliding_window": 6}, MLPConfig(24)
)
MAMBA = LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(DecoderConfig(20, 16, (ATTENTION, MAMBA)), key=jax.random.key(5))


@eqx.filter_jit
def _next(model, tokens, length):
    return jnp.argmax(model(tokens)[0, length - 1])


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """By a whole pass for each token, padded to one shape."""
    row = [*prompt, *[0] * (20 - len(prompt))]
    for length in range(len(prompt), len(prompt) + count):
        row[length] = int(_next(model, jnp.asarray([row]), length))
    return row[len(prompt) : len(prompt) + count]


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


def test_greedy_texts_of_prompts_of_any_length(model):
    """In lists, and in an array that is padded on either side."""
    expected = [greedy(model, prompt, 7) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=7).texts() == expected
    rows = [np.asarray(PROMPTS[0]), jnp.asarray(PROMPTS[1]), PROMPTS[2]]
    assert generate(model, rows, max_new_tokens=7).texts() == expected
    tokens, mask = np.zeros((2, 3, 8), int)
    for row, (prompt, first) in enumerate(zip(PROMPTS, (0, 7, 1))):
        tokens[row, first : first + len(prompt)], mask[row, first : first + len(prompt)] = prompt, 1
    assert (
        generate(model, jnp.asarray(tokens), padding_mask=jnp.asarray(mask > 0), max_new_tokens=7).texts()
        == expected
    )


def test_no_rows_and_sizes_of_numpy(model, unchecked):
    none = generate(model, np.zeros((0, 3), int), max_new_tokens=2)
    assert none.tokens.shape == (0, 2) and none.texts() == []
    plain: Any = generate(model, PROMPTS, max_new_tokens=2, speculate=Speculation(num_draft_tokens=1))
    sizes: Any = [np.int64(2), np.int64(1)]
    speculate = Speculation(num_draft_tokens=sizes[1])
    assert generate(model, PROMPTS, max_new_tokens=sizes[0]).texts() == plain.texts()
    assert generate(model, PROMPTS, max_new_tokens=2, speculate=speculate).texts() == plain.texts()


def test_texts_with_64_bit_types(model):
    expected = generate(model, PROMPTS, max_new_tokens=3).texts()
    with jax.enable_x64(True):
        assert generate(model, PROMPTS, max_new_tokens=3).texts() == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_greedy_texts_of_a_state_in_parts(ranks):
    layer = LayerConfig("mamba3", {"head_dim": 8, "state_size": 8, "mimo_rank": ranks}, MLPConfig(24))
    model = Decoder(DecoderConfig(20, 16, (ATTENTION, layer)), key=jax.random.key(5))
    expected = [greedy(model, prompt, 7) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=7).texts() == expected


def test_any_number_of_new_tokens_is_one_program(model):
    with compilations():
        seven = generate(model, PROMPTS, max_new_tokens=7)
    with compilations() as later:
        one, more = (generate(model, PROMPTS, max_new_tokens=count) for count in (1, 11))
    assert not later
    assert one.tokens.shape == (3, 1) and more.tokens.shape == (3, 11)
    assert one.tokens.tolist() == seven.tokens[:, :1].tolist()
    assert seven.tokens.tolist() == more.tokens[:, :7].tolist()
    assert (one.lengths.tolist(), more.lengths.tolist()) == ([1] * 3, [11] * 3)


def test_prompts_of_near_lengths_are_one_program(model):
    rows = [[9, 2, 6, 5, 3], [8, 9, 7, 9, 3, 2, 3, 8]]
    with compilations():
        generate(model, jnp.asarray([3, 1, 4, 1, 5, 9]), max_new_tokens=2)
    with compilations() as later:
        found = [generate(model, jnp.asarray(row), max_new_tokens=2).tokens.tolist() for row in rows]
    assert not any("_begin" in name or "_continued" in name for name in later)
    assert found == [greedy(model, row, 2) for row in rows]


def test_caches_of_few_sizes():
    """Each of which is a program."""
    sizes = lambda backend, most: sorted({capacity_of(count, backend) for count in range(1, most)})
    assert sizes(Backend.GPU, 4097) == [256, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert sizes(Backend.GPU, 40000)[8:] == [
        6144,
        8192,
        *range(12288, 16385, 4096),
        *range(20480, 40961, 4096),
    ]
    assert sizes(Backend.CPU, 300) == [64, 128, 192, 256, 320]
    for count in range(1, 9000):
        assert count <= capacity_of(count, Backend.GPU) <= max(512, 1.5 * count)


def test_rows_end_by_themselves(model):
    whole = [greedy(model, prompt, 7) for prompt in PROMPTS]
    stop = whole[1][2]
    found = generate(model, PROMPTS, max_new_tokens=7, stop_tokens=[stop, 19])
    ended = [next((i + 1 for i, t in enumerate(row) if t in (stop, 19)), 7) for row in whole]
    assert min(ended) < 7
    assert found.texts() == [row[:n] for row, n in zip(whole, ended)]
    assert np.all(np.asarray(found.tokens)[np.arange(7) >= np.asarray(found.lengths)[:, None]] == -1)


@pytest.mark.slow
def test_equal_seeds_draw_equally(model):
    options: Any = {"prompts": [[3, 1, 4]] * 2, "max_new_tokens": 12}
    draw = lambda *given, **more: generate(model, **options, sampling=Sampling(*given), **more).texts()
    one = draw(1.5, 0, 1.0, 1)
    assert one == draw(1.5, 0, 1.0, 1) != draw(1.5, 0, 1.0, 9)
    assert one[0] != one[1]  # rows draw by themselves
    assert draw(1.5, key=jax.random.key(0)) != draw(1.5, key=jax.random.key(1))
    assert draw(1.5, 1) == draw(1.5, 0, 1e-6) == [greedy(model, [3, 1, 4], 12)] * 2


@pytest.mark.slow
def test_rows_with_nan_end_and_are_reported(model):
    """The token 7 has a broken embedding: a row that reads it ends, and the others go on."""
    broken = eqx.tree_at(lambda m: m.embedding, model, model.embedding.at[7].set(jnp.nan))
    with pytest.warns(RuntimeWarning, match=r"the logits of rows \[1\] are not finite"):
        found = generate(broken, [[1, 2, 3], [1, 7, 3]], max_new_tokens=3, stop_tokens=())
    assert found.texts() == [greedy(model, [1, 2, 3], 3), []]
    assert found.finite.tolist() == [True, False] and found.tokens[1].tolist() == [-1] * 3


@pytest.mark.slow
def test_a_whole_generation_may_be_jitted(model):
    prompt = jnp.asarray([[3, 1, 4]])
    inside = eqx.filter_jit(lambda model, prompt: generate(model, prompt, max_new_tokens=4).tokens)
    assert inside(model, prompt)[0].tolist() == greedy(model, [3, 1, 4], 4)


HOLES = jnp.asarray([[True, False, True]])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "prompts: expected at least one token in each"),
        ([[20]], {}, "prompts: expected tokens from 0 to 19, received 20"),
        ("def", {}, "prompts: expected integers .* received str 'def'; ejx.serving.text.TextModel"),
        ([], {}, r"prompts: expected integers .* received list \[\]; tokens are integers"),
        ([1, 2, 3], {}, "prompts: expected a list of tokens for each text"),
        (["hello"], {}, r"received str 'hello' as prompts\[0\]; ejx.serving.text.TextModel takes texts"),
        ([[1], ["hello"]], {}, r"received str 'hello' in prompts\[1\]; ejx.serving.text.TextModel"),
        ([[1, 1.5]], {}, r"received float 1.5 in prompts\[0\]; tokens are integers"),
        ([[1], [True]], {}, r"received bool True in prompts\[1\]"),
        ([[1], [[2]]], {}, r"received list \[2\] in prompts\[1\]"),
        (jnp.zeros((2, 0), int), {}, "prompts: expected at least one token"),
        (
            jnp.ones((1, 3), int),
            {"padding_mask": HOLES},
            "padding_mask: expected the real tokens of each row",
        ),
        ([[1]], {"padding_mask": jnp.ones((1, 1), bool)}, "padding_mask: expected None with lists"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: .* integer, received 0; pass 1 or more"),
        ([[1]], {"stop_tokens": 5}, "stop_tokens: expected a sequence of tokens, received 5"),
        ([[1]], {"stop_tokens": [99]}, "stop_tokens: expected tokens from 0 to 19, received 99"),
        ([[1]], {"sampling": 0.7}, "sampling: expected a Sampling, received float"),
        ([[1]], {"key": jax.random.key(0)}, "key: expected None without sampling, received a key"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_continued_is_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **({"max_new_tokens": 2} | options))


ANY: Any = generate
ANY_SAMPLING: Any = Sampling


def test_an_option_of_sampling_is_passed_in_one(model):
    with pytest.raises(TypeError, match=r"'temperature'; write sampling=Sampling\(temperature=...\)"):
        ANY(model, [[1]], max_new_tokens=2, temperature=0.7)
    with pytest.raises(TypeError, match=r"generate: expected max_new_tokens, .*only model, prompts; write"):
        ANY(model, [[1]])
    with pytest.raises(TypeError, match=r"Sampling: expected some of .*'temprature'; did you mean temp"):
        ANY_SAMPLING(temprature=0.7)


@pytest.mark.usefixtures("unchecked")
def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"model: expected an ejx\.models\.Decoder"):
        ANY(eqx.nn.Linear(2, 2, key=jax.random.key(0)), [[1]], max_new_tokens=1)
