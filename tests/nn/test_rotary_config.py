"""Rotations from published configurations: frequencies and magnitudes as `transformers` 5.23 gives them for the same ones."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn
from ejkernel_eqx.nn import DynamicScaling, LongRopeScaling, RotaryEmbedding
from tests.nn.checks import refuses

BASE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
ORIGINAL = "original_max_position_embeddings"
SHORT, LONG = [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0], [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 32.0]
DYNAMIC = BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
PHI3: dict[str, Any] = BASE | {
    "max_position_embeddings": 1024,
    ORIGINAL: 64,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 512}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 128, "truncate": False}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32}
DEEPSEEK = {"type": "yarn", "factor": 40, ORIGINAL: 128} | MSCALES
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 16, "max_position_embeddings": 256}
GEMMA3_SCALED = GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
OF_LAYERS = {"sliding_attention": LOCAL, "full_attention": PROPORTIONAL}
GEMMA4 = {"head_dim": 16, "rope_parameters": OF_LAYERS}
FULL: Any = {"layer_type": "full_attention"}
SLIDING: Any = {"layer_type": "sliding_attention"}
WRONG: Any = 2.0
# A configuration, for which layers or length, the frequencies and the magnitude.
PUBLISHED = {
    "default": (BASE | {"rope_theta": 500000.0}, {},
        [1.0, 0.1939228, 0.03760603, 0.007292665, 0.001414213, 0.0002742482, 5.318296e-05, 1.031339e-05], 1.0),
    "linear": (BASE | {"rope_scaling": {"type": "linear", "factor": 4.0}}, {},
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05], 1.0),
    "dynamic, as trained": (DYNAMIC, {"length": 128}, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278], 1.0),
    "dynamic, one more": (DYNAMIC, {"length": 129},
        [1.0, 0.3155281, 0.09955801, 0.03141335, 0.009911796, 0.003127451, 0.0009867987, 0.0003113627], 1.0),
    "dynamic, long": (DYNAMIC, {"length": 1000},
        [1.0, 0.2155548, 0.04646388, 0.01001551, 0.002158892, 0.0004653596, 0.0001003105, 2.162241e-05], 1.0),
    "llama3": (BASE | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, {},
        [1.0, 0.1939228, 0.02734413, 0.0009115831, 0.0001767767, 3.428102e-05, 6.64787e-06, 1.289173e-06], 1.0),
    "yarn": (BASE | {"rope_scaling": YARN}, {},
        [1.0, 0.1992153, 0.02599482, 0.0009882118, 0.0003125, 9.882118e-05, 3.125e-05, 9.882118e-06], 1.3465735902799727),
    "yarn, deepseek": ({"qk_rope_head_dim": 16, "rope_scaling": DEEPSEEK}, {},
        [1.0, 0.2134537, 0.035, 0.0007905695, 0.00025, 7.905695e-05, 2.5e-05, 7.905694e-06], 1.1557219901962608),
    "longrope, short": (PHI3, {"length": 64}, [1.0, 0.2874798, 0.08, 0.02108185, 0.005, 0.001264911, 0.0003333333, 7.905695e-05], 1.2909944487358056),
    "longrope, long": (PHI3, {"length": 65}, [1.0, 0.2108185, 0.05, 0.007905695, 0.00125, 0.0002635232, 6.25e-05, 9.882118e-06], 1.2909944487358056),
    "partial": (BASE | {"partial_rotary_factor": 0.25}, {}, [1.0, 0.01], 1.0),
    "partial, of the model type": (BASE | {"model_type": "stablelm"}, {}, [1.0, 0.01], 1.0),
    "partial, GPT-NeoX": (BASE | {"rotary_pct": 0.25, "rotary_emb_base": 10000}, {}, [1.0, 0.01], 1.0),
    "partial, GPT-J": ({"n_embd": 64, "n_head": 4, "rotary_dim": 4}, {}, [1.0, 0.01], 1.0),
    "gemma 3, all": (GEMMA3_SCALED, FULL, [0.125, 0.02222849, 0.003952847, 0.0007029267, 0.000125, 2.222849e-05, 3.952847e-06, 7.029267e-07], 1.0),
    "gemma 3, window": (GEMMA3_SCALED, SLIDING, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278], 1.0),
    "gemma 3, given": (GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 2e4}, SLIDING,
        [1.0, 0.2899821, 0.08408964, 0.02438449, 0.007071068, 0.002050483, 0.0005946035, 0.0001724244], 1.0),
    "gemma 4": (GEMMA4, FULL, [1.0, 0.1778279, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_give_the_published_frequencies(name):
    config, how, frequencies, magnitude = PUBLISHED[name]
    length = how.get("length", 1)
    rope = RotaryEmbedding.from_config(config, layer_type=how.get("layer_type"))
    np.testing.assert_allclose(rope.frequencies(length), frequencies, rtol=1e-6, atol=0)
    # At position 1 the first half of an x of ones has magnitude * (cos - sin); the lengths put the token into a longer sequence.
    half = len(frequencies)
    turned = rope(jnp.ones((1, 1, rope.head_dim)), offset=1, lengths=length)[0, 0, :half]
    expected = magnitude * (np.cos(frequencies) - np.sin(frequencies))
    np.testing.assert_allclose(turned, expected, rtol=1e-5, atol=1e-6)


def test_nested_parameters_are_those_of_the_layers():
    layers = {"full_attention": LLAMA3 | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    nested = BASE | {"rope_parameters": layers}
    assert RotaryEmbedding.from_config(nested, **FULL) == RotaryEmbedding(16, theta=5e5, scaling=LLAMA3)
    assert RotaryEmbedding.from_config(nested, **SLIDING) == RotaryEmbedding(16)


@pytest.mark.parametrize(
    ("given", "magnitude"),
    [
        ({}, 1 + 0.1 * math.log(40)),
        # One of the two alone says nothing.
        ({"mscale": 0.5}, 1 + 0.1 * math.log(40)),
        ({"mscale_all_dim": 0.5}, 1 + 0.1 * math.log(40)),
        ({"mscale": 0.0, "mscale_all_dim": 0.5}, 1 + 0.1 * math.log(40)),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (1 + 0.2 * math.log(40)) / (1 + 0.05 * math.log(40))),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 0.8}, 0.8),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5, "mscale": 2.0, "mscale_all_dim": 0.5}, 1.0),
        ({"factor": None}, 1 + 0.1 * math.log(16)),  # of the two lengths
    ],
)
def test_magnitudes_of_yarn(given, magnitude):
    scaling = {"rope_type": "yarn", "factor": 40.0, ORIGINAL: 64} | given
    rope = RotaryEmbedding.from_config(BASE | {"max_position_embeddings": 1024, "rope_parameters": scaling})
    turned = rope(jnp.ones((1, 1, 16)))[0, 0]  # at position 0 nothing else is left
    np.testing.assert_allclose(turned, magnitude, rtol=1e-6)


def test_the_dict_gives_what_is_not_said_beside_it():
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    expected = RotaryEmbedding(16, theta=5e5, rotary_dim=8, scaling=nn.LinearScaling(4.0))
    assert RotaryEmbedding(16, scaling=linear) == expected
    other = RotaryEmbedding(16, theta=1e4, rotary_dim=4, scaling=linear)
    assert (other.theta, other.rotary_dim) == (1e4, 4)
    su = PHI3["rope_scaling"] | {"type": "su", ORIGINAL: 64, "attention_factor": 1.5, "factor": None}
    for entries, scaling in (
        (su, LongRopeScaling(SHORT, LONG, 64, attention_factor=1.5)),
        ({"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 64}, DynamicScaling(2.0, 64)),
        ({"rope_type": "proportional"}, nn.ProportionalScaling(1.0)),
    ):
        assert RotaryEmbedding(16, scaling=entries).scaling == scaling
    sections = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    rope = RotaryEmbedding.from_config(BASE | {"rope_scaling": sections}, interleaved=True)
    assert rope == RotaryEmbedding(16, mrope_section=(4, 2, 2), mrope_interleaved=True, interleaved=True)


from_config, longrope = RotaryEmbedding.from_config, LongRopeScaling
scaled = lambda scaling, dim=16: RotaryEmbedding(dim, scaling=scaling)
OTHER, NESTED = {"rope_scaling": 2.0}, BASE | {"rope_parameters": {"full_attention": {}}}
ERRORS = {
    "rope_type of default, mrope, linear, .*'ntk'": lambda: scaled({"rope_type": "ntk"}),
    f"expected {ORIGINAL} in a dict": lambda: scaled({"type": "dynamic", "factor": 2.0}),
    "only known keys .* received attn": lambda: scaled(LLAMA3 | {"attn": 2}),
    "received factor": lambda: scaled({"rope_type": "default", "factor": 2.0}),
    "expected head_dim, or hidden_size": lambda: from_config({"rope_theta": 1e4}),
    r"pass config\['text_config'\]": lambda: from_config({"text_config": BASE}),
    "config: expected the dictionary of a config.json, received float": lambda: from_config(WRONG),
    "config: rope_scaling: expected an object of .*received 2.0": lambda: from_config(BASE | OTHER),
    "layer_type: expected one of full_attention, sliding_attention": lambda: from_config(GEMMA3),
    "expected one of full_attention, .* received 'other'": lambda: from_config(NESTED, layer_type="other"),
    "short_factor: expected 8": lambda: scaled(longrope(SHORT[:4], LONG, 64, 2.0)),
    "factor: expected a number, received None": lambda: longrope(SHORT, LONG, 64),
    "short_factor: expected a list": lambda: longrope(WRONG, LONG, 64, 2.0),
    r"long_factor\[0\]: expected a positive": lambda: longrope(SHORT, [0.0], 64, 2.0),
    "short_mscale, long_mscale: expected both": lambda: longrope(SHORT, LONG, 64, short_mscale=1.0),
    "factor: expected a positive": lambda: DynamicScaling(0.0, 64),
    "rotary_dim: expected at least 4": lambda: scaled(DynamicScaling(2.0, 64), 2),
    "fraction: expected at most 1": lambda: nn.ProportionalScaling(1.5),
}


test_errors = refuses(ERRORS)
