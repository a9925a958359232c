# pyright: reportArgumentType=false, reportCallIssue=false
"""Calls whose arguments do not fit a signature say which ones do, for every operation, layer and function."""

import inspect
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import models, nn
from ejkernel_eqx._signatures import Module
from tests import functional_stub

CLASSES = {f"ejx.{cls.__name__}": cls for cls in functional_stub.operations()}
CLASSES |= {
    f"{room.__name__.rpartition('.')[2]}.{name}": cls
    for room in (nn, models)
    for name, cls in vars(room).items()
    if inspect.isclass(cls) and issubclass(cls, eqx.Module)
}
IS_WRITTEN = {
    name: inspect.unwrap(cls.__init__).__code__.co_filename != "<string>" for name, cls in CLASSES.items()
}
"""Whether `__init__` is written, not generated, as it is for caches and states."""
KEY = jax.random.key(0)
X = jnp.ones((2, 5, 8))
Q = jnp.ones((1, 5, 2, 16))

pytestmark = pytest.mark.usefixtures("unchecked")


def refused(*parts: str) -> Any:
    return pytest.raises(TypeError, match=".*".join(map(re.escape, parts)))


def layer() -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(8, num_heads=2, key=KEY)


@pytest.mark.parametrize("name", [name for name in CLASSES if IS_WRITTEN[name]])
def test_a_misspelt_option_is_named_with_the_right_one(name):
    """The longest option with a letter too many."""
    cls = CLASSES[name]
    option = max(list(inspect.signature(cls.__init__).parameters)[1:], key=len)
    with refused(
        f"{cls.__name__}: expected some of ", option, f"received '{option}s'; did you mean {option}?"
    ):
        cls(**{f"{option}s": 1})


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (
            lambda: nn.MultiHeadAttention(8, 2, key=KEY),
            [
                "MultiHeadAttention: expected at most 1 argument by position (embed_dim), received 2; write ",
                "num_heads=..., key=...)",
            ],
        ),
        (
            lambda: nn.MultiHeadAttention(8, key=KEY),
            ["MultiHeadAttention: expected num_heads, ", "only embed_dim, key; write "],
        ),
        (
            lambda: nn.MultiHeadAttention(key=KEY),
            ["expected embed_dim and num_heads, ", "(embed_dim, num_heads=..., key=...)"],
        ),
        (
            lambda: layer()(X, X, X),
            [
                "MultiHeadAttention: expected at most 2 arguments by position (x, cache), received 3; pass others by name, such as kv_input"
            ],
        ),
        (lambda: layer()(X, position=1), ["received 'position'; did you mean positions?"]),
        (
            lambda: layer()(X, causal=True),
            ["received 'causal'; causal is an option: MultiHeadAttention(causal=...)"],
        ),
        (
            lambda: ejx.FlashAttention(mask=None),
            [
                "FlashAttention: ",
                "received 'mask'; mask is an argument of the call: FlashAttention(...)(..., mask=...)",
            ],
        ),
        (
            lambda: ejx.FlashAttention()(Q, Q, Q, logit_soft_cap=3.0),
            ["logits_soft_cap is an option: FlashAttention(logits_soft_cap="],
        ),
        (
            lambda: ejx.flash_attention(Q, Q, Q, logit_soft_cap=3.0),
            ["flash_attention: ", "did you mean logits_soft_cap?"],
        ),
        (
            lambda: layer().init_cache(2, max_len=4),
            ["MultiHeadAttention.init_cache: ", "received 'max_len'; did you mean max_length?"],
        ),
        (
            lambda: nn.KVCache.init(max_lenght=4),
            ["KVCache.init: ", "received 'max_lenght'; did you mean max_length?"],
        ),
        (lambda: ejx.TuneOptions(time_budgets=1), ["TuneOptions: ", "did you mean time_budget?"]),
        (lambda: ejx.PageTable(num_page=3), ["PageTable: ", "did you mean num_pages?"]),
        (lambda: ejx.Buckets((1,), (1,), query_lens=(1,)), ["Buckets: ", "did you mean query_len?"]),
        (
            lambda: ejx.FlashAttention()(),
            ["FlashAttention: expected q and k and v, ", "no arguments; write FlashAttention(q, k, v)"],
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(call, parts):
    with refused(*parts):
        call()


@pytest.mark.parametrize("name", [name for name in CLASSES if not IS_WRITTEN[name]])
def test_caches_and_states_have_methods_that_say_it(name):
    assert issubclass(CLASSES[name], Module)


def test_other_type_errors_are_passed_on():
    class Layer(Module):
        size: int

        def __init__(self, size):
            self.size = size

        def __call__(self, x):
            return x + self.size

    with pytest.raises(TypeError, match="unsupported operand"):
        Layer("3")(2)


def test_a_layer_in_plain_jit_names_the_remedy():
    with refused(
        "MultiHeadAttention",
        "jax.jit(layer)",
        "use equinox.filter_jit(layer)",
        "jax.jit(lambda layer, x: layer(x))(layer, x)",
    ):
        jax.jit(layer())(X)
    assert hash(ejx.FlashAttention()) == hash(
        ejx.FlashAttention()
    )  # without weights there is something to hash


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ejx.explain("flashattention"), "received 'flashattention'; did you mean flash_attention?"),
        (
            lambda: ejx.explain("flash_attention", T=8, H=2, D=16, cauzal=True),
            "received cauzal; did you mean causal?",
        ),
        (
            lambda: ejx.FlashAttention(platform="tritn"),
            "received 'tritn'; use None to choose by device; did you mean triton?",
        ),
        (
            lambda: ejx.MeanPooling(num_segments=3.0),
            "num_segments: expected a static int >= 0, received 3.0; pass the integer 3.",
        ),
        (lambda: ejx.MeanPooling(num_segments=-1), "received -1; pass 0 or more."),
        (lambda: ejx.MeanPooling(num_segments="3"), "received '3'; pass an integer of Python."),
        (
            lambda: nn.MultiHeadAttention(8, num_heads=2.0, key=KEY),
            "num_heads: expected a positive integer, received 2.0; pass the integer 2.",
        ),
    ],
)
def test_a_wrong_word_or_number_names_the_right_one(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_traced_size_is_static():
    with pytest.raises(ValueError, match=r"num_segments: .* static argument of jit"):
        jax.jit(lambda n: ejx.MeanPooling(num_segments=n).plan)(3)
