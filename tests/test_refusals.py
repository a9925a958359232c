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


attention = layer()
CALLS = {
    "by position": (
        lambda: nn.MultiHeadAttention(8, 2, key=KEY),
        [
            "MultiHeadAttention: expected at most 1 argument by position (embed_dim), received 2; write ",
            "key=...)",
        ],
    ),
    "missing": (
        lambda: nn.MultiHeadAttention(8, key=KEY),
        ["expected num_heads, ", "only embed_dim, key; write "],
    ),
    "both missing": (lambda: nn.MultiHeadAttention(key=KEY), ["expected embed_dim and num_heads, "]),
    "by position in a call": (
        lambda: attention(X, X, X),
        ["at most 2 arguments by position (x, cache), received 3; pass others by name, such as kv_input"],
    ),
    "misspelt": (lambda: attention(X, position=1), ["received 'position'; did you mean positions?"]),
    "option in a call": (lambda: attention(X, causal=True), ["option: MultiHeadAttention(causal=...)"]),
    "argument as an option": (
        lambda: ejx.FlashAttention(mask=None),
        ["mask is an argument of the call: FlashAttention(...)(..., mask=...)"],
    ),
    "misspelt option in a call": (
        lambda: ejx.FlashAttention()(Q, Q, Q, logit_soft_cap=3.0),
        ["logits_soft_cap is an option: FlashAttention(logits_soft_cap="],
    ),
    "function": (
        lambda: ejx.flash_attention(Q, Q, Q, logit_soft_cap=3.0),
        ["flash_attention: ", "did you mean logits_soft_cap?"],
    ),
    "method": (
        lambda: attention.init_cache(2, max_len=4),
        ["MultiHeadAttention.init_cache: ", "max_length?"],
    ),
    "classmethod": (lambda: nn.KVCache.init(max_lenght=4), ["KVCache.init: ", "did you mean max_length?"]),
    "options": (lambda: ejx.TuneOptions(time_budgets=1), ["TuneOptions: ", "did you mean time_budget?"]),
    "table": (lambda: ejx.PageTable(num_page=3), ["PageTable: ", "did you mean num_pages?"]),
    "buckets": (lambda: ejx.Buckets((1,), (1,), query_lens=(1,)), ["Buckets: ", "did you mean query_len?"]),
    "nothing": (
        lambda: ejx.FlashAttention()(),
        ["expected q and k and v, ", "no arguments; write FlashAttention(...)(q"],
    ),
    "misspelt for one that is missing": (
        lambda: nn.GatedDeltaNet(8, num_heads=2, key=KEY),
        ["received 'num_heads'; did you mean num_k_heads?"],
    ),
    "the end of a name": (
        lambda: ejx.flash_attention(Q, Q, Q, scale=1.0),
        ["received 'scale'; did you mean softmax_scale?"],
    ),
    "arrays for a truth value": (
        lambda: ejx.FlashAttention(Q, Q, Q),
        ["FlashAttention: expected options, received arrays; ", "FlashAttention(...)(q, k, v)."],
    ),
    "traced arrays for a choice": (
        lambda: jax.jit(lambda x: ejx.GatedRMSNorm(x, x))(X),
        ["GatedRMSNorm: expected options, received arrays; ", "GatedRMSNorm(...)(x)."],
    ),
    "plain jit": (
        lambda: jax.jit(layer())(X),
        ["MultiHeadAttention", "jax.jit(layer)", "use equinox.filter_jit(layer)", "jax.jit(lambda layer, x:"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_is_said_with_what_does(name):
    call, parts = CALLS[name]
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


VALUES = {
    "mixer": (lambda: models.LayerConfig("atention"), "received 'atention'; did you mean attention?"),
    "updates of a layer": (
        lambda: models.add_lora(layer(), 2, key=KEY),
        "model: expected a Decoder, received MultiHeadAttention; ejx.models.LoRA replaces one projection",
    ),
    "updates of no projection": (
        lambda: models.LoRA(layer(), 2, key=KEY),
        "base: expected an equinox.nn.Linear, received MultiHeadAttention",
    ),
    "rank": (
        lambda: models.LoRA(eqx.nn.Linear(2, 2, key=KEY), 0, key=KEY),
        "rank: expected a positive integer, received 0",
    ),
    "name": (lambda: ejx.explain("flashattention"), "'flashattention'; did you mean flash_attention?"),
    "flag": (
        lambda: ejx.explain("flash_attention", T=8, H=2, D=16, cauzal=True),
        "received cauzal; did you mean causal?",
    ),
    "platform": (
        lambda: ejx.FlashAttention(platform="tritn"),
        "received 'tritn'; use None to choose by device; did you mean triton?",
    ),
    "float": (
        lambda: ejx.MeanPooling(num_segments=3.0),
        "num_segments: expected a static int >= 0, received 3.0; pass the integer 3.",
    ),
    "negative": (lambda: ejx.MeanPooling(num_segments=-1), "received -1; pass 0 or more."),
    "text": (lambda: ejx.MeanPooling(num_segments="3"), "received '3'; pass an integer of Python."),
    "heads": (lambda: nn.MultiHeadAttention(8, num_heads=2.0, key=KEY), "received 2.0; pass the integer 2."),
    "traced": (lambda: jax.jit(lambda n: ejx.MeanPooling(num_segments=n).plan)(3), " static argument of jit"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_word_or_number_names_the_right_one(name):
    call, message = VALUES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
