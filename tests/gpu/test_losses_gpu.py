"""Losses of a projection on a GPU: the Triton kernels against the formula in float64, repeated runs, and every candidate of the tuner.

```sh
python -m pytest tests/gpu/test_losses_gpu.py -n 8
```
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import assert_agrees, assert_same
from tests.gpu.host import candidates, example_problem, on_host
from tests.losses.cases import Case, CASES, config_of, exact, make, results
from tests.losses.teachers import CASES as TEACHERS
from tests.losses.teachers import Compared, DIVERGENCES, Size
from tests.losses.test_statistics import everything, formula, OPTIONS
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "linear_cross_entropy"
OPERATION = "linear_cross_entropy"


def longer(case: Case) -> Case:
    """The same in several programs and chunks, with a last tile that is not full."""
    lead = (*case.lead[:-1], 40 * case.lead[-1])
    words = 97 * case.vocabulary
    return dataclasses.replace(case, lead=lead, vocabulary=words, features=max(136, case.features), chunk=96)


EVERY = CASES | {f"{name}, long": longer(case) for name, case in CASES.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", EVERY)
def test_losses(name, dtype):
    """Losses and all gradients; the same bit for bit when run again."""
    case = dataclasses.replace(EVERY[name], dtype=dtype)
    inputs, labels, dout = make(case)
    op = case.operation("triton")
    found = results(op, inputs, labels, dout)
    assert_agrees(case, found, on_host(exact, case, inputs, labels, dout))
    assert_same(results(op, inputs, labels, dout), found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_statistics(name, reduction):
    case = longer(Case((3, 7), ignored=5, bias=True, weighted=True))
    options = OPTIONS[name] | {"reduction": reduction}
    case = dataclasses.replace(case, options=options)
    inputs, labels, _ = make(case)
    op = case.operation("triton")

    def linear(x, weight, labels, bias, token_weights):
        return op(x, labels, weight, bias, token_weights, return_statistics=True)

    def expected():
        with jax.enable_x64(True):
            wide = {key: jnp.asarray(np.asarray(x, np.float64)) for key, x in inputs.items()}
            return jax.tree.map(np.asarray, everything(functools.partial(formula, **options), wide, labels))

    found, wanted = everything(linear, inputs, labels), on_host(expected)
    assert (np.asarray(found.pop("top")) == wanted.pop("top")).all()
    for key, x in found.items():
        assert_close(x, wanted[key], kind="gradient" if key in inputs else "forward", name=key)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("size", [Size(), Size(300, 136, 1003, 72)])
@pytest.mark.parametrize("divergence, form", [case for case in TEACHERS if "top_k" not in case])
def test_divergences(divergence, form, size, dtype, reduction):
    """In one chunk and in several; the same bit for bit when run again."""
    case = Compared(divergence, form, reduction, dtype, size)
    found = case.results("triton", config_of("triton", 96))
    case.assert_agrees(found, on_host(case.exact))
    assert_same(case.results("triton", config_of("triton", 96)), found)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_candidate_of_divergences(divergence):
    case = Compared(divergence, "features", "sum", "bfloat16", Size(700, 256, 50257, 128))
    problem = example_problem(
        "linear_divergence", dict(N=700, E=256, V=50257, F=128), "bfloat16", dict(divergence=divergence)
    )
    wanted = on_host(case.exact)
    for config in candidates("linear_divergence", problem):
        case.assert_agrees(case.results("triton", config), wanted)


def test_every_candidate():
    case = Case((1, 1500), 50257, "bfloat16", dict(reduction="sum", z_loss=1e-4), features=256)
    problem = example_problem(OPERATION, dict(N=1500, E=256, V=50257), "bfloat16", dict(z_loss=True))
    inputs, labels, dout = make(case)
    wanted = on_host(exact, case, inputs, labels, dout)
    for config in candidates(OPERATION, problem):
        op = ejx.LinearCrossEntropy(**case.options, config=config)
        assert_agrees(case, results(op, inputs, labels, dout), wanted)


@pytest.mark.memory(24)
def test_past_two_gigabytes():
    """The last tokens of a chunk whose logits are more than 32-bit offsets reach, against a call of theirs alone."""
    tokens, words = 20_000, 131_072
    x = jax.random.normal(jax.random.key(0), (tokens, 64), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (words, 64), jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, words)
    config = dataclasses.replace(
        candidates(OPERATION, example_problem(OPERATION, dict(N=tokens, E=64, V=words), "bfloat16", {}))[0],
        chunk_size=tokens,
        grad_chunk_size=tokens,
    )
    op = ejx.LinearCrossEntropy("none", config=config)

    @jax.jit
    def both(x, labels):
        out, pull = jax.vjp(lambda x: op(x, labels, weight), x)
        return out[-100:], pull(jnp.ones_like(out))[0][-100:]

    for found, alone in zip(both(x, labels), both(x[-100:], labels[-100:])):
        assert_close(found, np.asarray(alone, np.float64), "bfloat16", "gradient")
