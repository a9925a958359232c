"""A layer in one launch: the logits and caches of XLA, which layers and calls it is for, and how it composes."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.launch import compile_ahead, executing
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig
from ejkernel_eqx.models.one_launch import launch
from tests.models.test_rows_as_pages import close, INTERPRET, STEPS

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rope": ejx.nn.RotaryEmbedding(64)}
NORMED = LayerConfig("attention", HEADS | {"qk_norm": True}, MLPConfig(512))
PLAIN = LayerConfig("attention", HEADS | {"softmax_scale": 0.2}, MLPConfig(256))


def model_of(platform: str, *layers: LayerConfig) -> Decoder:
    return Decoder(DecoderConfig(40, 256, layers), platform=platform, key=jax.random.key(3))


@pytest.fixture
def launched(monkeypatch):
    """The rows of each launch."""
    rows, run = [], launch.launch_layer

    def noted(arrays: Any, *args: Any) -> Any:
        rows.append(arrays["x"].shape[0])
        return run(arrays, *args)

    monkeypatch.setattr(launch, "launch_layer", noted)
    jax.clear_caches()
    yield rows
    jax.clear_caches()


PROMPT = jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, 77)))


@pytest.mark.parametrize("length", [1, 33, 77])
def test_logits_and_caches_are_those_of_xla(length, launched, monkeypatch):
    """Two layers, and keys that fill their last tile and that do not; a row that has ended changes nothing."""
    monkeypatch.setattr(launch, "BLOCK_K", 16)

    @eqx.filter_jit
    def run(model):
        _, cache = model(PROMPT[:, :length], model.init_cache(1, 128))
        logits, cache = model(PROMPT[:, :1], cache)
        _, cache = model(PROMPT[:, :1], cache, padding_mask=jnp.zeros((1, 1), bool))
        return logits, cache

    close(run(model_of(INTERPRET, NORMED, PLAIN)), run(model_of("xla", NORMED, PLAIN)))
    assert len(launched) >= 4


def test_texts_are_the_same(launched):
    given: Any = {"max_new_tokens": 5, "stop_tokens": ()}
    texts = [
        ejx.models.generate(model_of(p, NORMED), PROMPT[:, :4], **given).texts() for p in (INTERPRET, "xla")
    ]
    assert texts[0] == texts[1] and launched


OTHERS = {
    "window": {"sliding_window": 5},
    "biases": {"use_qkv_bias": True},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 5.0},
    "gate": {"output_gate": True},
    "half a rotation": {"rope": ejx.nn.RotaryEmbedding(64, rotary_dim=32)},
    "no rotation": {"rope": None},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_launched_apart(name, launched):
    other = dataclasses.replace(NORMED, options=HEADS | OTHERS[name])
    model = model_of(INTERPRET, other)
    jax.eval_shape(lambda: model(STEPS[0][:1], model.init_cache(1, 64)))
    assert not launched


@pytest.mark.parametrize(
    "change", [{"norms": "around"}, {"mlp": MLPConfig(512, activation="gelu")}, {"mixer_scales": (1.0, 0.5)}]
)
def test_other_blocks_are_launched_apart(change, launched):
    model = model_of(INTERPRET, dataclasses.replace(NORMED, **change))
    jax.eval_shape(lambda: model(STEPS[0][:1], model.init_cache(1, 64)))
    assert not launched


def test_mapped_calls_are_launched_apart():
    model = model_of(INTERPRET, NORMED)
    tokens = jnp.stack([STEPS[0][:1], STEPS[1][:1]])

    def run(model, tokens):
        return model(tokens, model.init_cache(1, 64))[0]

    mapped = eqx.filter_jit(jax.vmap(lambda t: run(model, t)))(tokens)
    close(mapped, jnp.stack([run(model_of("xla", NORMED), t) for t in tokens]))


def test_several_rows_are_launched_apart(launched):
    model = model_of(INTERPRET, NORMED)
    jax.eval_shape(lambda: model(STEPS[0], model.init_cache(3, 64)))
    assert not launched


def test_sizes_that_programs_cannot_share():
    sizes = launch.Sizes(1024, 3072, 16, 8, 128)
    assert launch.tile_of(sizes, 256) == launch.LayerTile(8)
    for change in ({"embed": 896}, {"dim": 96}, {"hidden": 3328}, {"kv_heads": 4, "heads": 20}):
        assert launch.tile_of(dataclasses.replace(sizes, **change), 256) is None


def test_fits_a_gpu_without_spills():
    """Qwen3-0.6B's layer, in both dtypes that it is for."""
    found: list[Any] = []

    def record(made: Any, inputs: Any) -> Any:
        found.append(made)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in made.outputs.items()}

    sizes = launch.Sizes(1024, 3072, 16, 8, 128)
    of = {
        "norm": (1024,),
        "mlp_norm": (1024,),
        "q_weight": (2048, 1024),
        "k_weight": (1024, 1024),
        "v_weight": (1024, 1024),
    }
    of |= {
        "o_weight": (1024, 2048),
        "gate_weight": (3072, 1024),
        "up_weight": (3072, 1024),
        "down_weight": (1024, 3072),
        "x": (1, 1024),
    }
    of |= {"q_norm": (128,), "k_norm": (128,), "k": (4, 64, 8, 128), "v": (4, 64, 8, 128)}
    numbers = {"PAGE": 64, "NORM": True, "EPS": 1e-6, "HEAD_EPS": 1e-6, "SCALE": 0.1}
    tile = launch.tile_of(sizes, 256)
    assert tile is not None
    for dtype in ("bfloat16", "float32"):
        arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in of.items()}
        arrays |= {name: jax.ShapeDtypeStruct((1, 64), jnp.float32) for name in ("cos", "sin")}
        arrays |= {
            "table": jax.ShapeDtypeStruct((1, 4), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((1,), jnp.int32),
        }

        def call(arrays: Any) -> Any:
            with executing(record):
                return launch.launch_layer(arrays, sizes, tile, numbers)

        jax.eval_shape(call, arrays)
        report = compile_ahead(found[-1], "sm_90")
        assert report.fits and (report.spills == 0 or dtype == "float32"), report
