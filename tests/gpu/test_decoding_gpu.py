"""The matmul of few rows, the rotation of heads and whole steps of decoding on a GPU: against the float64 reference, and against XLA.

python -m pytest tests/gpu/test_decoding_gpu.py
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.quantised.format import word_of
from tests.agreement import assert_agrees
from tests.attention.dense import normal
from tests.gpu.host import candidates, example_problem, on_host
from tests.matmul.dense import cases as rows
from tests.matmul.dense import weights
from tests.models.test_rows_as_pages import close, model_of
from tests.rotary_heads import test_rotary_heads as heads
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "matmul"
LONG = rows.CASES | {
    "a step": rows.Case((1, 1024), (2048, 1024, 1024), "bfloat16", norm=True),
    "several steps": rows.Case((9, 1000), (1003, 77), "bfloat16", norm=True, bias=True),
    "many rows": rows.Case((64, 3072), (1024,), "bfloat16", residual=True),
    "several tiles": rows.Case((3, 67, 1024), (1000, 1024), "bfloat16", norm=True, bias=True),
    "half": rows.Case((1, 520), (300,), "float16", norm=True),
    "a gate": rows.Case((3, 1024), (3072, 3072), "bfloat16", "silu", gated=True, norm=True),
    "float32": rows.Case((2, 11, 520), (300,), "float32", "gelu", norm=True, residual=True),
}


@pytest.mark.parametrize("name", LONG)
def test_rows_by_weights(name):
    """Results and every gradient; the same bit for bit when run again."""
    case = LONG[name]
    given, cotangents = rows.make(case)
    op = rows.operation(case, platform="triton")
    found = rows.results(op, case, given, cotangents)
    assert_agrees(case, found, on_host(rows.exact, case, given, cotangents))
    for name, x in rows.results(op, case, given, cotangents).items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(found[name]), err_msg=name)


@pytest.mark.parametrize("count", [1, 9, 64, 200])
@pytest.mark.parametrize("name", weights.FORMS)
def test_rows_by_codes(name, count):
    """Every candidate of every format, with features that fill no tile."""
    for columns, features in ((1100, 1024), (72, 1360)):
        coded, numbers = weights.weight(name, columns, features)
        x, norm = normal(1, count, features, dtype="bfloat16"), 1 + 0.1 * normal(2, features)
        wide = np.asarray(x, np.float64)
        h = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm, np.float64)
        flags: Any = {"weights": "int8", "norm": True}
        problem = example_problem("matmul", dict(M=count, K=features, N=columns), "bfloat16", flags)
        known = dict(problem.flags) | {"weights": word_of(weights.FORMS[name])}
        problem = dataclasses.replace(problem, flags=tuple(sorted(known.items())))
        for config in candidates("matmul", problem):
            found = ejx.Matmul(platform="triton", config=config)(x, coded, norm=norm)
            assert_close(found, h @ numbers.T, name=str(config))


@pytest.mark.parametrize("count", [1, 2, 9, 64, 200])
@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_of_rows(count, gated):
    case = rows.Case((count, 1024), (1100, 1100), "bfloat16", "silu" if gated else None, gated, norm=True)
    given, cotangents = rows.make(case)
    expected = on_host(rows.exact, case, given, cotangents)
    dims = dict(M=count, K=1024, N=1100) | ({} if gated else {"N1": 1100})
    problem = example_problem("matmul", dims, case.dtype, {"norm": True, "gated": gated})
    for config in candidates("matmul", problem):
        outs = rows.call(rows.operation(case, config=config, platform="triton"), case, given)
        for name, out in zip(("out", "out_1"), outs):
            assert_close(out, expected[name], case.dtype, name=name)


@pytest.mark.parametrize("name", heads.CASES)
def test_rotary_heads(name):
    case = heads.CASES[name]
    given, cotangents = heads.make(case)
    found = heads.results(ejx.RotaryHeads(case.interleaved, platform="triton"), case, given, cotangents)
    assert_agrees(case, found, on_host(heads.exact, case, given, cotangents))


@pytest.mark.parametrize("name", ["attention", "window", "hybrid"])
def test_texts_of_prompts_of_unequal_lengths(name):
    """Prompts are read without the cache, into which their keys go in place; then steps read it."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 40, n).tolist() for n in (3, 70, 17)]
    given: Any = {"max_new_tokens": 12, "stop_tokens": ()}
    texts = lambda platform: ejx.models.generate(model_of(name, platform), prompts, **given).texts()
    with jax.default_matmul_precision("highest"):
        assert texts("triton") == on_host(lambda: texts("xla"))


@pytest.mark.parametrize("name", ["attention", "window", "hybrid", "latent"])
def test_steps_in_one_program_are_those_of_xla(name):
    """A cache made inside the compiled function, several steps, rows that end at different times; run twice."""
    prompt = np.random.default_rng(1).integers(0, 40, (3, 7), np.int32)

    @eqx.filter_jit
    def run(model):
        logits, cache = model(prompt, model.init_cache(3, 64))

        def step(carry, n):
            token, cache = carry
            goes_on = n < jnp.array([9, 3, 6])
            logits, cache = model(token[:, None], cache, padding_mask=goes_on[:, None])
            return (jnp.where(goes_on, jnp.argmax(logits[:, 0], -1), token), cache), (token, logits[:, 0])

        first = jnp.argmax(logits[:, -1], -1)
        (_, cache), (tokens, logits) = jax.lax.scan(step, (first, cache), jnp.arange(9))
        real = np.arange(9)[:, None] < np.array([[9, 3, 6]])
        return tokens, jnp.where(real[..., None], logits, 0)

    # The head's product is XLA's, which may round operands of float32 products on a GPU.
    with jax.default_matmul_precision("highest"):
        tokens, logits = run(model_of(name, "triton"))
        again = run(model_of(name, "triton"))
        wanted = on_host(lambda: run(model_of(name, "xla")))
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(again[0]))
    np.testing.assert_array_equal(np.asarray(logits), np.asarray(again[1]))
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(wanted[0]))
    close(logits, wanted[1])


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_generated_tokens_are_those_of_xla(name):
    prompts = [[1, 2, 3, 4, 5], [7], [3, 1, 3, 1]]
    call = lambda platform, **more: ejx.models.generate(
        model_of(name, platform), prompts, max_new_tokens=70, stop_tokens=(), **more
    )
    wanted = np.asarray(call("xla").tokens)
    np.testing.assert_array_equal(np.asarray(call("triton").tokens), wanted)
    drafts = ejx.models.Speculation(num_draft_tokens=3)
    np.testing.assert_array_equal(np.asarray(call("triton", speculate=drafts).tokens), wanted)
    model = model_of(name, "triton")
    streamed = list(ejx.models.stream(model, prompts, max_new_tokens=70, stop_tokens=()))
    np.testing.assert_array_equal(np.stack(streamed, -1).reshape(wanted.shape), wanted)
