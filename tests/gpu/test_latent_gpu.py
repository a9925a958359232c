"""Latent attention on a GPU: the Triton kernels against numpy in float64, repeated runs, candidates of the tuner, and the layer's decoding.

```sh
python -m pytest tests/gpu/test_latent_gpu.py -n 8
```
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import causal, cotangents, lse_of, normal, with_gradients
from tests.gpu.host import candidates, example_problem, work_of
from tests.latent.cases import exact_expanded, poison
from tests.tolerances import assert_close, errors

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION = "multi_head_latent_attention"
NEEDS = OPERATION


def arrays_of(t: int, s: int, heads: int, dims: tuple[int, int, int], dtype: Any) -> dict[str, Any]:
    nope, rope, values = dims
    return dict(
        q=normal(0, 2, t, heads, nope + rope, dtype=dtype),
        k=normal(1, 2, s, heads, nope, dtype=dtype),
        k_rope=normal(2, 2, s, rope, dtype=dtype),
        v=normal(3, 2, s, heads, values, dtype=dtype),
    )


IDS = np.sort(np.random.default_rng(0).integers(-1, 4, (2, 700)), axis=1)
LENGTHS = np.array([700, 123])
CALLS: dict[str, Any] = {
    "causal": (700, 700, dict(causal=True), {}, causal(700, 700)),
    "all": (256, 640, {}, {}, True),
    "chunk": (100, 700, dict(causal=True, logits_soft_cap=3.0), {}, causal(100, 700)),
    "window": (700, 700, dict(causal=True, sliding_window=90), {}, causal(700, 700) & ~causal(700, 700, -90)),
    "segments": (
        700,
        700,
        dict(causal=True),
        dict(segment_ids=jnp.asarray(IDS)),
        ((IDS[..., None] == IDS[:, None]) & (IDS >= 0)[..., None] & causal(700, 700))[:, None],
    ),
    "lengths": (
        100,
        700,
        {},
        dict(kv_lengths=jnp.asarray(LENGTHS)),
        np.broadcast_to((np.arange(700) < LENGTHS[:, None])[:, None, None], (2, 1, 100, 700)),
    ),
}


TILES = np.random.default_rng(1).random((11, 11)) < 0.4
CALLS |= {
    "slopes": (300, 700, dict(causal=True), dict(alibi_slopes=jnp.linspace(0.01, 0.2, 5)), causal(300, 700)),
    "dense mask": (
        300,
        700,
        {},
        dict(mask=jnp.asarray(np.tile(TILES[:3, :7], (100, 100)))),
        np.tile(TILES[:3, :7], (100, 100)),
    ),
    "map of blocks": (
        700,
        700,
        {},
        dict(mask=ejx.Mask.from_blocks(TILES, 64)),
        np.repeat(np.repeat(TILES, 64, 0), 64, 1)[:700, :700],
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dims", [(128, 64, 128), (64, 32, 64), (24, 8, 40)])
@pytest.mark.parametrize("name", CALLS)
def test_expanded(name, dims, dtype):
    """Results and gradients, and the same bits when run again."""
    t, s, options, call, seen = CALLS[name]
    given = arrays_of(t, s, 5, dims, jnp.dtype(dtype))
    op = lse_of(ejx.MultiHeadLatentAttention(**options, platform="triton"), **call)
    run = jax.jit(lambda *args: with_gradients(lambda a: op(**a), *args))
    dout, dlse = cotangents(given)
    found, again = run(given, dout, dlse), run(given, dout, dlse)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    learned = {name: call[name] for name in ("alibi_slopes",) if name in call}
    expected, grads = exact_expanded(given | learned, dout, dlse, seen, cap=options.get("logits_soft_cap"))
    for x, y in zip(found[0], expected, strict=True):
        assert_close(x, y, dtype)
    for of, x in found[1].items():
        assert_close(x, grads[of], dtype, "gradient", name=of)


@pytest.mark.parametrize("dims", [(128, 64, 128), (72, 32, 104)])
@pytest.mark.parametrize("name", ["causal", "all", "window", "segments"])
def test_hoppers_kernels(name, dims):
    """As `test_expanded`, of few queries, which are Triton's by default; with NaN in what is hidden."""
    t, s, options, call, seen = CALLS[name]
    given = arrays_of(t, s, 5, dims, jnp.bfloat16)
    shape = dict(B=2, T=t, S=s, H=5, D=dims[0] + dims[1], V=dims[2], Dr=dims[1])
    configs = candidates(OPERATION, example_problem(OPERATION, shape, "bfloat16", {}))
    hoppers = [c for c in configs if c.forward.hopper_programs and c.key_gradient.hopper_programs]
    if not hoppers:
        pytest.skip("needs Hopper's kernels")
    op = lse_of(ejx.MultiHeadLatentAttention(**options, platform="triton", config=hoppers[0]), **call)
    run = jax.jit(lambda *args: with_gradients(lambda a: op(**a), *args))
    dout, dlse = cotangents(given)
    visible = np.broadcast_to(seen, (2, 1, t, s))
    poisoned = poison(given, ~visible.any((1, 2)), ~visible.any((1, 3)))
    found, again = run(given, dout, dlse), run(poisoned, dout, dlse)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    expected, grads = exact_expanded(given, dout, dlse, seen)
    for x, y in zip(found[0], expected, strict=True):
        assert_close(x, y, "bfloat16")
    for of, x in found[1].items():
        assert_close(x, grads[of], "bfloat16", "gradient", name=of)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_bias_and_dropout(rate):
    """Beside XLA, which drops the same entries."""
    given = arrays_of(300, 500, 5, (128, 64, 128), jnp.float32) | {"bias": normal(7, 1, 5, 300, 500)}
    dout, dlse = cotangents(given)

    def of(platform: Any) -> Any:
        op = ejx.MultiHeadLatentAttention(causal=True, dropout_rate=rate, platform=platform)
        return jax.jit(
            lambda *args: with_gradients(lambda a: op(**a, key=jax.random.key(1), return_lse=True), *args)
        )(given, dout, dlse)

    (results, grads), (expected, exact) = of("triton"), of("xla")
    for x, y in zip(results, expected, strict=True):
        assert_close(x, np.asarray(y, np.float64), "float32")
    for name, x in grads.items():
        assert_close(x, np.asarray(exact[name], np.float64), "float32", "gradient", name=name)


@pytest.mark.parametrize(
    "flags", [{}, {"segments": True}, {"rows": True, "sinks": True}, {"bias": "HTS"}], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_candidate(dtype, flags):
    problem = example_problem(OPERATION, dict(B=2, T=512, H=4, D=192, V=128, Dr=64), dtype, flags)
    work = work_of(OPERATION, problem)
    inputs = work.make_inputs(5)
    reference = work.reference(inputs)
    for config in candidates(OPERATION, problem):
        actual = jax.jit(work.run, static_argnums=1)(inputs, config)
        for name, allowed in work.tolerances.items():
            measured = errors(actual[name], reference[name])
            assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (config, name, measured)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads, queries", [(16, 1), (128, 1), (16, 5)])
def test_absorbed(heads, queries, is_causal):
    """In DeepSeek's sizes as on XLA, whose queries and outputs are rounded alike."""
    given = dict(
        q=normal(0, 3, queries, heads, 192, dtype=jnp.bfloat16),
        latent=normal(1, 3, 500, 512, dtype=jnp.bfloat16),
        k_rope=normal(2, 3, 500, 64, dtype=jnp.bfloat16),
    )
    weights = {
        name: (normal(i, heads, 128, 512) / 23).astype(jnp.bfloat16)
        for i, name in enumerate(("w_uk", "w_uv"))
    }

    def of(platform: Any) -> Any:
        op = ejx.AbsorbedLatentAttention(is_causal, softmax_scale=192**-0.5, platform=platform)
        return jax.jit(lambda a: op(**a, kv_lengths=jnp.array([500, 77, 6]), return_lse=True))(
            given | weights
        )

    for x, y in zip(of("triton"), of("xla"), strict=True):
        assert_close(x, np.asarray(y, np.float64), "bfloat16")


@pytest.fixture
def in_full_precision():
    """Products in float32 are not rounded to TF32: a chunk's are of other shapes than those of the whole, and round differently."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("in_full_precision")
@pytest.mark.parametrize("rank", [None, 96])
def test_the_layer_decodes_as_the_whole(rank, monkeypatch):
    """In float32: a long chunk, expanded and merged; a short one and tokens, absorbed; dense and in pages."""
    monkeypatch.setattr(
        "ejkernel_eqx.nn.latent_attention.expands", lambda tokens, queries, sizes: queries >= 64
    )
    layer = ejx.nn.MultiHeadLatentAttention(
        256,
        num_heads=4,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=rank,
        key=jax.random.key(0),
    )
    x = normal(5, 2, 200, 256)
    expected = layer(x)
    cache, outs = layer.init_cache(2, 256), []
    for part in jnp.split(x, (100, 190, 199), axis=1):
        y, cache = jax.jit(lambda x, c: layer(x, c))(part, cache)
        outs.append(y)
    assert_close(jnp.concatenate(outs, 1), expected, "float32")
    pages, outs = layer.init_paged_cache(40, 16), []
    tables = np.random.default_rng(0).permutation(40)[:26].reshape(2, 13)
    for first, last in ((0, 100), (100, 190), (190, 199), (199, 200)):
        batch = ejx.RaggedBatch.build([last - first] * 2, [last] * 2, tables, page_size=16)
        y, pages = jax.jit(lambda x, c, b: layer(x, c, batch=b))(
            x[:, first:last].reshape(-1, 256), pages, batch
        )
        outs.append(y.reshape(2, -1, 256))
    assert_close(jnp.concatenate(outs, 1), expected, "float32")
