"""Tokens given out as they come are those of `generate`, and the device runs ahead of who reads them."""

import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models import Decoder, DecoderConfig, generate, programs, Sampling, stream
from tests.compilations import compilations
from tests.models.test_generate import ATTENTION, MAMBA, PROMPTS


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(DecoderConfig(20, 16, (ATTENTION, MAMBA)), key=jax.random.key(5))


def equal(model: Decoder, prompts: Any, steps_per_call: int = 1, **options: Any) -> None:
    whole = generate(model, prompts, **options)
    steps = list(stream(model, prompts, steps_per_call=steps_per_call, **options))
    assert all(tokens.dtype == np.int32 and tokens.shape == whole.lengths.shape for tokens in steps)
    assert len(steps) == np.max(whole.lengths)
    np.testing.assert_array_equal(np.stack(steps, axis=-1), whole.tokens[..., : len(steps)])


@pytest.mark.parametrize("steps_per_call", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_are_those_of_a_whole_call(model, steps_per_call):
    """With rows that end at once, later and never, in a call's middle."""
    whole = generate(model, PROMPTS, max_new_tokens=8).texts()
    equal(model, PROMPTS, steps_per_call, max_new_tokens=8)
    equal(model, PROMPTS, steps_per_call, max_new_tokens=8, stop_tokens=[whole[1][2]])
    equal(model, PROMPTS, steps_per_call, max_new_tokens=8, stop_tokens=[row[0] for row in whole])
    equal(model, jnp.asarray([3, 1, 4]), steps_per_call, max_new_tokens=1)


@pytest.mark.slow
def test_drawn_steps_are_those_of_a_whole_call(model):
    equal(model, PROMPTS, 2, max_new_tokens=7, sampling=Sampling(1.5, seed=3))
    equal(model, jnp.ones((2, 2, 3), int), max_new_tokens=5, sampling=Sampling(1.5), key=jax.random.key(1))


def test_a_step_is_compiled_once(model):
    with compilations():
        list(stream(model, PROMPTS, max_new_tokens=4))
    with compilations() as later:
        list(stream(jax.tree.map(lambda x: x, model), [[1, 2], [3], [4]], max_new_tokens=9))
    assert not later


def test_closing_frees_the_caches(model):
    def held() -> int:
        gc.collect(1)  # the young ones: all of them are many
        return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())

    options: dict[str, Any] = {"max_new_tokens": 500}
    list(stream(model, PROMPTS, max_new_tokens=2))
    before = held()
    tokens = stream(model, PROMPTS, **options)
    next(tokens)
    room = model.init_cache(3, 512).nbytes
    assert held() >= before + room
    tokens.close()
    assert held() < before + room / 10
    for _ in stream(model, PROMPTS, **options):
        break
    assert held() < before + room / 10


@pytest.mark.slow
def test_rows_with_nan_end_and_are_reported(model):
    broken = eqx.tree_at(lambda m: m.embedding, model, model.embedding.at[7].set(jnp.nan))
    tokens = stream(broken, [[1, 2, 3], [1, 7, 3]], max_new_tokens=3, stop_tokens=())
    with pytest.warns(RuntimeWarning, match=r"stream: the logits of rows \[1\] are not finite"):
        steps = np.stack(list(tokens))
    assert steps[:, 1].tolist() == [-1] * 3 and np.all(steps[:, 0] >= 0)


def test_progress_is_told_of_every_block(model):
    prompts, told = [*PROMPTS], []
    options: dict[str, Any] = {"max_new_tokens": 40}
    plain = generate(model, prompts, **options)
    found = generate(model, prompts, **options, progress=lambda *counts: told.append(counts))
    for one, other in zip(found, plain):
        np.testing.assert_array_equal(one, other)
    assert told == [(1, 40), (17, 40), (33, 40), (40, 40)]
    assert all(type(count) is int for counts in told for count in counts)


@pytest.mark.slow
def test_progress_ends_with_the_rows(model):
    whole = generate(model, [PROMPTS[0]], max_new_tokens=8).texts()[0]
    options: dict[str, Any] = {"max_new_tokens": 40, "stop_tokens": [whole[5]]}
    told = []
    found = generate(model, [PROMPTS[0]], **options, progress=lambda *counts: told.append(counts))
    assert told == [(1, 40), (len(found.texts()[0]), 40)] and len(found.texts()[0]) <= 6

    def stops(tokens: int, most: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, max_new_tokens=8, progress=stops)


ANY: Any = stream
GENERATE: Any = generate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [[]]}, "prompts: expected at least one token in each"),
        ({"max_new_tokens": 0}, "max_new_tokens: .* integer, received 0; pass 1 or more"),
        ({"steps_per_call": 0}, "steps_per_call: .* integer, received 0; pass 1 or more"),
        ({"cache_dtype": "int8"}, "dtype: expected a floating dtype, received 'int8'"),
        ({"sampling": 0.7}, "sampling: expected a Sampling, received float"),
        ({"model": 3}, r"model: expected an ejx\.models\.Decoder, received int"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_streamed_is_refused_at_the_call(model, options, message):
    with pytest.raises(ValueError, match=message):
        ANY(**({"model": model, "prompts": [[1]], "max_new_tokens": 2} | options))


@pytest.mark.usefixtures("unchecked")
def test_what_the_host_cannot_read_is_refused(model):
    traced = eqx.filter_eval_shape
    with pytest.raises(ValueError, match=r"stream: expected arrays that the host can read, .*use generate"):
        traced(lambda x: list(stream(model, x, max_new_tokens=2)), jnp.asarray([[1]]))
    with pytest.raises(ValueError, match="progress: expected None for arrays that the host cannot read"):
        traced(lambda x: generate(model, x, max_new_tokens=2, progress=print).tokens, jnp.asarray([[1]]))
    with pytest.raises(ValueError, match="progress: expected a function of two integers, received 3"):
        GENERATE(model, [[1]], max_new_tokens=2, progress=3)
    with pytest.raises(TypeError, match=r"stream: expected .*'temperature'; write sampling=Sampling"):
        ANY(model, [[1]], max_new_tokens=2, temperature=0.7)
    with pytest.raises(TypeError, match=r"stream: expected some of .*'step_per_call'; did you mean steps"):
        ANY(model, [[1]], max_new_tokens=2, step_per_call=2)


def test_the_device_runs_ahead(model, monkeypatch):
    """Two steps are under way when a token is read."""
    calls = []
    advance = programs._advance
    count = lambda *arguments: calls.append(1) or advance(*arguments)
    monkeypatch.setattr(programs, "_advance", count)
    begun = []
    for _ in stream(model, PROMPTS, max_new_tokens=9):
        begun.append(len(calls))
    assert begun == [min(2 + n, 8) for n in range(9)]
