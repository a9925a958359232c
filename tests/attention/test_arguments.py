"""What a user is told: one sentence that names the argument, what was expected, what came, and what to do."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask, UnsupportedError
from tests.arrays import array
from tests.attention.cases import xla_tiles
from tests.attention.inner import Backend, device_facts, parse_window, XlaConfig

pytestmark = pytest.mark.usefixtures("unchecked")


def x(*shape, dtype=jnp.float32):
    return array(np.ones(shape), dtype)


Q, K = x(2, 6, 4, 8), x(2, 10, 2, 8)
PACKED = (x(6, 4, 8), x(10, 2, 8), x(10, 2, 8))
CU = jnp.array([0, 2, 6])


def assert_says(error: Exception, *parts: str) -> None:
    message = str(error)
    assert re.match(r"^[\w, .]+: expected .*, received .*[.?]$", message), message
    assert "\n" not in message and len(message) < 260, message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


CALLS = {
    # q, k, v
    "rank": ((x(6, 8), K, K), {}, ["q: expected rank 3 or more", "(6, 8)", "add the missing axes"]),
    "list": (([1.0], K, K), {}, ["q: expected an array", "received list"]),
    "integers": ((Q, K, x(2, 10, 2, 8, dtype=jnp.int32)), {}, ["v: expected dtype bfloat16", "received int32", "cast it"]),
    "two dtypes": ((Q, K.astype(jnp.bfloat16), K), {}, ["q, k, v: expected one dtype", "float32, bfloat16, float32"]),
    "head ratio": ((x(2, 6, 3, 8), K, K), {}, ["q: expected the number of query heads to be a multiple of the 2 key heads", "(2, 6, 3, 8)"]),
    "heads of v": ((Q, K, x(2, 10, 1, 8)), {}, ["v: expected the shape of k except for the last axis, (2, 10, 2)", "(2, 10, 1)"]),
    "leading axes": ((Q, x(3, 10, 2, 8), x(3, 10, 2, 8)), {}, ["k: expected the leading axes of q, (2,)", "(3,)", "jax.vmap"]),
    "head dim": ((Q, x(2, 10, 2, 16), K), {}, ["k: expected the head_dim of q, 8", "received 16"]),
    # what masks
    "mask dtype": ((Q, K, K), dict(mask=x(6, 10)), ["mask: expected a boolean array", "float32", "bias="]),
    "mask shape": ((Q, K, K), dict(mask=np.ones((10, 6), bool)), ["mask: expected a shape broadcastable to (2, 4, 6, 10)", "(10, 6)"]),
    "mask rank": ((Q, K, K), dict(mask=np.ones((1, 2, 4, 6, 10), bool)), ["mask: expected a shape broadcastable to", "(1, 2, 4, 6, 10)"]),
    "mask segments": ((Q, K, K), dict(mask=Mask.from_segments(np.zeros((6,), int))), ["mask: expected segment ids for 6 queries and 10 keys"]),
    "mask lengths": ((Q, K, K), dict(mask=Mask.from_lengths(kv_lengths=[1, 2, 3])), ["mask.kv_lengths: expected a shape broadcastable to (2,)"]),
    "segment length": ((Q, K, K), dict(segment_ids=np.zeros((2, 7), int)), ["segment_ids: expected ints [..., 6]", "(2, 7)"]),
    "segment dtype": ((Q, K, K), dict(segment_ids=x(2, 6)), ["segment_ids: expected ints [..., 6]", "float32"]),
    "segment rows": ((Q, Q, Q), dict(segment_ids=np.zeros((3, 6), int)), ["segment_ids: expected a shape broadcastable to (2, 6)", "(3, 6)"]),
    "key segments missing": ((Q, K, K), dict(segment_ids=np.zeros((2, 6), int)),
        ["kv_segment_ids: expected ids for 10 keys, since their number differs from the 6 queries", "received None", "pass both"]),
    "query segments missing": ((Q, K, K), dict(kv_segment_ids=np.zeros((2, 10), int)), ["segment_ids: expected ids of the queries"]),
    "segments and packing": (PACKED, dict(segment_ids=np.zeros((6,), int), cu_seqlens=CU), ["segment_ids: expected None with cu_seqlens"]),
    "lengths and packing": (PACKED, dict(kv_lengths=3, cu_seqlens=CU, kv_cu_seqlens=CU), ["kv_lengths: expected None with cu_seqlens"]),
    "offset and packing": (PACKED, dict(q_offset=3, cu_seqlens=CU, kv_cu_seqlens=CU), ["q_offset: expected None with cu_seqlens"]),
    "segments and a packed mask": (PACKED, dict(segment_ids=np.zeros((6,), int), mask=Mask.from_cu_seqlens(CU)),
        ["segment_ids: expected None with cu_seqlens"]),
    "packing and batch": ((Q, K, K), dict(cu_seqlens=CU, kv_cu_seqlens=CU), ["cu_seqlens: expected q of shape [tokens, heads, head_dim]", "(2,)"]),
    "key packing missing": (PACKED, dict(cu_seqlens=CU), ["kv_cu_seqlens: expected offsets for 10 keys", "received None", "pass both"]),
    "query packing missing": (PACKED, dict(kv_cu_seqlens=CU), ["cu_seqlens: expected the offsets of the queries", "only kv_cu_seqlens"]),
    "packings differ": (PACKED, dict(cu_seqlens=CU, kv_cu_seqlens=jnp.array([0, 10])),
        ["kv_cu_seqlens: expected the same number of sequences as cu_seqlens, (3,)", "(2,)"]),
    "packing dtype": (PACKED, dict(cu_seqlens=x(3), kv_cu_seqlens=x(3)), ["cu_seqlens: expected int offsets [N + 1]", "float32"]),
    "packing list": (PACKED, dict(cu_seqlens=[0]), ["cu_seqlens: expected int offsets [N + 1]", "(1,)"]),
    "packing rank": (PACKED, dict(cu_seqlens=CU[None], kv_cu_seqlens=CU[None]), ["cu_seqlens: expected int offsets [N + 1]", "(1, 3)"]),
    "lengths dtype": ((Q, K, K), dict(kv_lengths=x(2)), ["kv_lengths: expected ints, one per batch row (2,)", "float32"]),
    "lengths shape": ((Q, K, K), dict(q_lengths=jnp.array([1, 2, 3])), ["q_lengths: expected a shape broadcastable to (2,)", "(3,)"]),
    "offset dtype": ((Q, K, K), dict(q_offset=1.5), ["q_offset: expected ints", "float32"]),
    "offset shape": ((Q, K, K), dict(q_offset=jnp.array([1, 2, 3])), ["q_offset: expected a shape broadcastable to (2,)", "(3,)"]),
    # what changes scores
    "bias dtype": ((Q, K, K), dict(bias=np.ones((6, 10), bool)), ["bias: expected floats", "bool", "mask="]),
    "bias shape": ((Q, K, K), dict(bias=x(3, 1, 6, 10)), ["bias: expected a shape broadcastable to (2, 4, 6, 10)", "(3, 1, 6, 10)"]),
    "bias of three axes": ((Q, K, K), dict(bias=x(4, 6, 10)), ["bias: expected [..., H, T, S]", "(4, 6, 10)", "bias[:, None]", "bias[None]"]),
    "mask of three axes": ((Q, K, K), dict(mask=np.ones((2, 6, 10), bool)), ["mask: expected [..., H, T, S]", "(2, 6, 10)", "mask[:, None]"]),
    "mask of three axes, as a Mask": ((Q, K, K), dict(mask=~ejx.Mask.from_dense(np.ones((1, 6, 10), bool))), ["mask: expected [..., H, T, S]"]),
    "sinks": ((Q, K, K), dict(sinks=x(2)), ["sinks: expected floats [4] or [4, n]", "(2,)"]),
    "sinks dtype": ((Q, K, K), dict(sinks=jnp.ones((4,), int)), ["sinks: expected floats [4] or [4, n]", "int32"]),
    "slopes": ((Q, K, K), dict(alibi_slopes=x(2, 4)), ["alibi_slopes: expected floats [4], one per query head", "(2, 4)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    args, kwargs, parts = CALLS[name]
    for operation in (ejx.FlashAttention, ejx.Attention):
        with pytest.raises(ValueError) as caught:
            operation()(*args, **kwargs)
        assert_says(caught.value, *parts)
    # The same under jit, before anything is compiled.
    if all(isinstance(arg, jax.Array) for arg in args):
        with pytest.raises(ValueError) as traced:
            jax.eval_shape(lambda *args: ejx.FlashAttention()(*args, **kwargs), *args)
        assert str(traced.value) == str(caught.value)


def test_dropout_needs_a_key():
    with pytest.raises(ValueError) as caught:
        ejx.FlashAttention(dropout_rate=0.1)(Q, K, K)
    assert_says(
        caught.value,
        "key: expected a JAX PRNG key because dropout_rate > 0",
        "received None",
        "inference=True",
    )
    ejx.FlashAttention(dropout_rate=0.1)(Q, K, K, inference=True)


OPTIONS = {
    "int window": (dict(sliding_window=4), ["sliding_window: expected a pair (left, right) when causal=False", "the int 4", "requires causal=True"]),
    "empty window": (dict(causal=True, sliding_window=0), ["sliding_window: expected at least 1 key", "received 0"]),
    "negative side": (dict(sliding_window=(3, -1)), ["sliding_window: expected a pair of key counts, each >= 0 or None", "(3, -1)"]),
    "window of a float": (dict(causal=True, sliding_window=4.0), ["sliding_window: expected an int, a pair (left, right) or None", "4.0"]),
    "soft cap": (dict(logits_soft_cap=0.0), ["logits_soft_cap: expected a number from 1e-30 to 1e+30 or None", "0.0", "None disables it"]),
    "soft cap NaN": (dict(logits_soft_cap=float("nan")), ["logits_soft_cap: expected a number from", "nan"]),
    "scale": (dict(softmax_scale=float("inf")), ["softmax_scale: expected a finite number or None", "inf", "D**-0.5"]),
    "dropout": (dict(dropout_rate=1.0), ["dropout_rate: expected a probability in [0, 1)", "1.0"]),
    "unknown platform": (dict(platform="tritn"), ["platform: expected one of 'cuda', 'triton'", "received 'tritn'", "use None to choose by device"]),
    "config of another kind": (dict(config=3), ["config: expected an instance of", "XlaConfig", "received 3"]),
    "config of another platform": (dict(platform="triton-interpret", config=xla_tiles(64, 64)),
        ["config: expected an instance of TritonConfig for platform 'triton-interpret'", "XlaConfig(forward=XlaTile(block_q=64, block_k=64)"]),
    "tune_for": (dict(tune_for=Q), ["tune_for: expected a tuple of the call's arguments or ejx.inputs(...)", "received ArrayImpl"]),
    "tune_for shapes": (dict(tune_for=(x(2, 6, 3, 8), K, K)), ["q: expected the number of query heads", "(2, 6, 3, 8)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_construction(name):
    options, parts = OPTIONS[name]
    if options.get("platform") == "triton-interpret":
        pytest.importorskip("triton")
    with pytest.raises(ValueError) as caught:
        ejx.FlashAttention(**options)
    assert_says(caught.value, *parts)


def test_tiles_that_no_kernel_has():
    from tests.attention import tritons as triton

    for sizes, named in (
        ((48, 64, 4, 2), "block_q"),
        ((64, 8, 4, 2), "block_k"),
        ((64, 64, 3, 2), "num_warps"),
        ((64, 64, 4, 0), "num_stages"),
    ):
        with pytest.raises(ValueError, match=rf"TileConfig.*{named}.* received") as caught:
            triton.TileConfig(*sizes)
        assert_says(caught.value)
    tile = triton.TileConfig(64, 64, 4, 2)
    with pytest.raises(ValueError) as caught:
        triton.TritonConfig(tile, tile, tile, float32_dot="fp8")
    assert_says(caught.value, "TritonConfig.float32_dot", "'fp8'")


def test_platforms_that_cannot_run_here():
    if device_facts().backend is Backend.GPU:
        pytest.skip("every platform may run on this machine")
    for platform in ("triton", "cuda"):
        with pytest.raises(UnsupportedError) as caught:
            ejx.FlashAttention(platform=platform)
        assert set(caught.value.reasons) == {platform} and "needs a GPU, the device is" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_no_platform_takes_is_said_at_construction():
    pytest.importorskip("triton")
    wide = jax.ShapeDtypeStruct((6, 2, 512), jnp.float32)
    with pytest.raises(UnsupportedError) as caught:
        ejx.FlashAttention(platform="triton-interpret", tune_for=(wide, wide, wide))
    assert "takes head dims above 256 by Hopper's kernel" in caught.value.reasons["triton-interpret"]
    with jax.enable_x64(True):
        double = jax.ShapeDtypeStruct((6, 2, 16), jnp.float64)
        with pytest.raises(UnsupportedError, match="takes float32, float16 and bfloat16, not float64"):
            ejx.FlashAttention(
                platform="triton-interpret", tune_for=ejx.inputs(double, double, double, return_lse=True)
            )
    module = ejx.FlashAttention(platform="triton-interpret")
    with pytest.raises(
        UnsupportedError, match="on platform 'triton-interpret': takes head dims above 256 by Hopper's"
    ):
        eqx.filter_eval_shape(module, wide, wide, wide)


def test_tune_for_takes_arrays_and_shapes():
    shape = jax.ShapeDtypeStruct((6, 2, 16), jnp.float32)
    for given in (
        (shape,) * 3,
        (jnp.ones(shape.shape),) * 3,
        ejx.inputs(shape, shape, shape, bias=jax.ShapeDtypeStruct((6, 6), jnp.float32)),
    ):
        with ejx.policy_override("heuristic"):
            module = ejx.FlashAttention(tune_for=given)
        (((platform, key), (known, _)),) = module.plan.pinned.items()
        assert platform == "xla" and '"T":8' in key and isinstance(known.config, XlaConfig)
        assert ('"bias":"1TS"' in key) == isinstance(given, ejx.Inputs)


@pytest.mark.parametrize(
    "given, causal, expected",
    [
        (None, True, (None, None)),
        (1, True, (0, 0)),
        (4, True, (3, 0)),
        ((3, 5), False, (3, 5)),
        ((None, 5), True, (None, 5)),
        ((0, 0), False, (0, 0)),
    ],
)
def test_windows(given, causal, expected):
    assert parse_window(given, causal) == expected


@pytest.mark.parametrize(
    "parts, sinks, message",
    [
        ([], None, "parts: expected at least one pair (out, lse), received none."),
        (
            [(x(6, 4, 8), x(4, 6))],
            None,
            "parts: expected out [..., T, H, V] and lse [..., T, H] with matching axes, received (6, 4, 8) and (4, 6).",
        ),
        ([(x(6, 4, 8), x(6, 4)), (x(5, 4, 8), x(5, 4))], None, "parts: expected out"),
        ([(x(6, 4, 8), x(6, 4))], x(3), "sinks: expected [4] or [4, n], received (3,)."),
    ],
)
def test_merging(parts, sinks, message):
    with pytest.raises(ValueError) as caught:
        ejx.merge_attention(*parts, sinks=sinks)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(local_window_size=-1), "sliding_window: expected a pair of key counts, each >= 0 or None"),
        (dict(scale=float("nan")), "softmax_scale"),
        (dict(mask=Q), "mask: expected a boolean array"),
    ],
)
def test_scaled_dot_product_attention(options, message):
    with pytest.raises(ValueError) as caught:
        ejx.ScaledDotProductAttention()(Q, K, K, **options)
    assert_says(caught.value, message)
