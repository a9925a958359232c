"""Many rows by quantised weights on a Hopper: its kernel and floats by a kernel, against the numbers of codes in float64.

python -m pytest tests/gpu/test_quantised_gpu.py -n 4
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts
from ejkernel_eqx.launch import gluon_unavailable
from ejkernel_eqx.matmul.dense.triton import many
from ejkernel_eqx.matmul.dense.triton.compiled import RowsTile, TritonConfig
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig
from tests.attention.dense import normal
from tests.matmul.dense import weights
from tests.tolerances import assert_close, errors

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
FLOATS = TritonConfig(RowsTile(64, 16, 32, 4, 1), floats_apart=True)


def tiles() -> list[TritonConfig]:
    """Every tile of Hopper's kernel."""
    if gluon_unavailable(device_facts()) is not None:
        return []
    return [TritonConfig(RowsTile(*sizes[:-1], hopper_programs=132)) for sizes in many.TILES]


@pytest.mark.parametrize("name", weights.FORMS)
def test_every_tile_of_every_format(name):
    """Rows, features and rows of the weight that fill no tile; twice the same bits; a row of NaN stays alone."""
    columns, features = 1096, 1056 if weights.FORMS[name].bits == 4 else 1040
    coded, numbers = weights.weight(name, columns, features)
    x = normal(1, 333, features, dtype="bfloat16")
    wanted = np.asarray(x, np.float64) @ numbers.T
    for config in (*tiles(), FLOATS):
        call = jax.jit(ejx.Matmul(platform="triton", config=config))
        out = call(x, coded)
        assert_close(out, wanted, name=str(config.tile))
        np.testing.assert_array_equal(np.asarray(call(x, coded)), np.asarray(out))
    poisoned = call(x.at[7].set(jnp.nan), coded)
    np.testing.assert_array_equal(np.asarray(jnp.isnan(poisoned).any(-1)), np.arange(333) == 7)


@pytest.mark.parametrize("name", ["int8", "fp8 blocks", "mxfp4"])
def test_more_tiles_than_programs(name):
    coded, numbers = weights.weight(name, 4096 + 128, 2048)
    x = normal(1, 1100, 2048, dtype="bfloat16")
    wanted = np.asarray(x, np.float64) @ numbers.T
    for config in tiles():
        call = jax.jit(ejx.Matmul(platform="triton", config=config))
        out = np.asarray(call(x, coded))
        assert_close(out, wanted, name=str(config.tile))
        for _ in range(8):
            np.testing.assert_array_equal(np.asarray(call(x, coded)), out)


@pytest.mark.parametrize("name, code", [("fp8", 0x7F), ("fp8 blocks", 0xFF)])
def test_a_code_of_nan_is_in_the_results_of_its_row(name, code):
    coded, _ = weights.weight(name, 256, 512)
    codes = np.array(coded.codes)
    codes[70, 300] = code
    coded = dataclasses.replace(coded, codes=codes)
    for config in (*tiles()[:1], FLOATS):
        out = ejx.Matmul(platform="triton", config=config)(normal(1, 300, 512, dtype="bfloat16"), coded)
        np.testing.assert_array_equal(np.asarray(jnp.isnan(out).all(0)), np.arange(256) == 70)
        assert int(jnp.isnan(out).sum()) == 300


@pytest.mark.parametrize("rows", [9, 40, 200])
def test_what_surrounds_the_products(rows):
    """The default of many rows: norm, gate, biases, residual, and gradients."""
    (w, nw), (u, nu) = weights.weight("fp8 blocks", 384, 512), weights.weight("fp8 blocks", 384, 512, 1)
    x, residual = normal(0, rows, 512, dtype="bfloat16"), normal(3, rows, 384, dtype="bfloat16")
    given = {"x": x, "norm": (1 + normal(1, 512) / 10) / 300, "bias": normal(2, 384), "residual": residual}

    def loss(given: Any, w: Any, u: Any, platform: Any = None) -> Any:
        op = ejx.Matmul("silu", gated=True, platform=platform)
        options = {"norm": given["norm"], "residual": given["residual"]}
        out = op(given["x"], w, u, biases=(None, given["bias"]), **options)
        return jnp.sum(out.astype("float32") * normal(4, rows, 384)), out

    both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3)
    (_, out), grads = both(given, w, u, None)
    floats = [jnp.asarray(n, "float32") for n in (nw, nu)]
    exact = jax.tree.map(lambda a: a.astype("float32"), given)
    with jax.default_matmul_precision("highest"):
        (_, wanted), wanted_grads = both(exact, *floats, "xla")
    assert_close(out, wanted, "bfloat16")
    for name, g in grads.items():
        assert_close(g, wanted_grads[name], "bfloat16", "gradient", name=name)


def test_a_model_of_many_tokens():
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rope": ejx.nn.RotaryEmbedding(64)}
    config = DecoderConfig(256, 256, (LayerConfig("attention", attention, MLPConfig(512)),) * 2)
    model = Decoder(config, dtype="bfloat16", key=jax.random.key(0))
    coded = ejx.quantise(model, "int8")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 300)))
    call = eqx.filter_jit(lambda model: model(tokens))
    found, wanted = call(coded), call(ejx.dequantise(coded))
    assert errors(found, wanted).rms < 0.02
    if tiles():
        chosen = [c for c in ejx.explain(coded, tokens).choices if c.operation == "matmul"]
        assert chosen and all(c.platform == "triton" for c in chosen)
