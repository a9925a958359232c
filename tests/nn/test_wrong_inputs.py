# pyright: reportArgumentType=false
"""Whatever is wrong with what a layer is given, the error names the argument, what was expected, what came, and what to do."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn, PagedKVCache, RaggedBatch
from tests.nn.recurrent_layers import build, EMBED
from tests.nn.recurrent_layers import LAYERS as RECURRENT

pytestmark = pytest.mark.usefixtures("unchecked")
KEY = jax.random.key(0)
ROWS, TOKENS, HEADS = 2, 5, 2  # as many rows as heads: one could be taken for the other


def _attention(**options):
    """The layer with ones for weights: nothing is computed with them, and JAX compiles a program for each draw."""
    make = lambda: nn.MultiHeadAttention(EMBED, **({"num_heads": HEADS, "key": KEY} | options))
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    ones = lambda leaf: jnp.asarray(np.ones(leaf.shape, leaf.dtype)) if is_shape(leaf) else leaf
    return jax.tree.map(ones, eqx.filter_eval_shape(make))


LAYERS = {
    "attention": lambda: _attention(rope=nn.RotaryEmbedding(EMBED // HEADS)),
    "cross": lambda: _attention(causal=False, kv_embed_dim=20),
    "both ways": lambda: _attention(causal=False),
    "conv": lambda: nn.ShortConvolution(6, key=KEY),
    "norm": lambda: nn.GatedRMSNorm(6),
}


@functools.cache
def _layer(name):
    return LAYERS[name]() if name in LAYERS else build(name)


def _x(*shape, dtype=np.float32):
    return np.ones(shape or (ROWS, TOKENS, EMBED), dtype)


X, ROW, IDS, MEMORY = _x(), _x(TOKENS, EMBED), _x(ROWS, TOKENS, dtype=np.int32), _x(ROWS, 7, 20)
CHANNELS, TOKEN, POOL = _x(2, 5, 6), _x(2, 6), _x(4, 3, 6)


def _batch(slots=(0, 1), **changes):
    starts, lengths, table = np.array([0, 3, 5]), np.array([3, 2]), np.array([[0], [1]])
    states = None if slots is None else np.array(slots)
    options = {"page_size": 4, "max_query_len": 3, "num_tokens": 5} | changes
    starts, lengths, table = (jnp.asarray(a, jnp.int32) for a in (starts, lengths, table))
    states = None if states is None else jnp.asarray(states, jnp.int32)
    return RaggedBatch(starts, lengths, table, states, **options)


# By the argument that the error names the values that are wrong for it, of every layer over tokens and then of some; beside rows `X`.
VALUES: dict[str, dict[str, Any]] = {
    "all": {
        "x": lambda f: (X.tolist(), None, 1.0, IDS, *(_x(dtype=dtype) for dtype in (np.int32, bool, np.complex64)))
        + (_x(EMBED), _x(ROWS, TOKENS, EMBED + 1)),
        "padding_mask": lambda f: ([[True] * TOKENS] * ROWS, IDS, _x(ROWS, TOKENS))
        + (_x(TOKENS, dtype=bool), _x(ROWS, 4, dtype=bool)),
        "segment_ids": lambda f: ([[0] * TOKENS] * ROWS, _x(ROWS, TOKENS), _x(ROWS, TOKENS, dtype=bool), IDS[0]),
    },
    "recurrent": {
        "state": lambda f: ({"conv": (), "recurrent": _x(2, 2)}, nn.KVCache.init(ROWS, 8, 2, 4), _x(2, 2))
        + (f.init_state(3), f.init_state(()), _integers_of(f.init_state(ROWS)))
        + (nn.RecurrentState((), _x(2, 2).tolist()),),
        "cu_seqlens": lambda f: (np.array([0, 5]),),
    },
    "attention": {
        "cache": lambda f: ({"k": 0, "v": 0}, (_x(2, 8, 2, 12), _x(2, 8, 2, 12)), f.init_cache(3, 8))
        + (nn.RecurrentState((), jnp.zeros(2)),),
        "padding_mask": lambda f: (np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]], bool),),
        "positions": lambda f: ([0, 1, 2, 3, 4], np.arange(5.0), np.array(3), np.arange(4))
        + (_x(3, ROWS, TOKENS, dtype=np.int32), _x(ROWS, TOKENS, 1, dtype=np.int32)),
        "mask": lambda f: ([[True] * TOKENS] * TOKENS, _x(TOKENS, TOKENS, dtype=np.int32), "causal")
        + (_x(ROWS, TOKENS, TOKENS, dtype=bool), _x(TOKENS, 4, dtype=bool)),
        "bias": lambda f: ([0.0] * TOKENS, _x(TOKENS, TOKENS, dtype=bool), _x(TOKENS, 4), _x(ROWS, TOKENS, TOKENS)),
        "key": lambda f: (0, jax.random.split(KEY, 2)),
        "inference": lambda f: ("no",),
        "return_lse": lambda f: (1,),
        "kv_padding_mask": lambda f: (_x(ROWS, TOKENS, dtype=bool),),
        "kv_input": lambda f: (X,),
    },
    "cross": {
        "kv_input": lambda f: (None, MEMORY.tolist(), MEMORY.astype(np.int32), _x(ROWS, 7, 21), _x(3, 7, 20))
        + (_x(7, 20),),
    },
    "conv": {"x": lambda f: (CHANNELS.tolist(), CHANNELS.astype(np.int32), _x(6), _x(2, 5, 7))},
    "norm": {"x": lambda f: ([0.0] * 6, _x(2, 6, dtype=np.int32), np.float32(1), _x(2, 5))},
}  # fmt: skip
# Beside one row.
PACKED: dict[str, dict[str, Any]] = {
    "all": {"batch": lambda f: ({"lengths": [5]},)},
    "recurrent": {
        "cu_seqlens": lambda f: (
            ([0, 3, 5], np.array([0.0, 5.0]), np.array([[0, 5]] * 2), np.zeros(0, np.int32))
            + (np.array([0, 4, 2]), np.array([0, 9]))
        ),
    },
    "attention": {"cu_seqlens": lambda f: ([0, TOKENS],)},
}


# Other wrong calls, by the argument that the error names: of every layer over tokens, and then of some.
_rows = lambda f, **given: f.init_cache(ROWS, 8, **given)
_pages = lambda f, **given: f.init_paged_cache(2, 4, **given)
_over = lambda f, cache=None, slots=(0, 1), x=ROW, **given: f(x, cache, batch=_batch(slots), **given)
_integers_of = lambda cache: jax.tree.map(lambda a: a.astype(jnp.int8), cache)
_step = lambda f, x=TOKEN, state=POOL, **given: f.step(x, state, **given)
CALLS: dict[str, dict[str, Any]] = {
    "all": {
        "x": (lambda f: _over(f, x=X), lambda f: _over(f, x=ROW.tolist()), lambda f: _over(f, x=ROW[:1])),
        "padding_mask": (lambda f: _over(f, padding_mask=_x(TOKENS, dtype=bool)),),
        "segment_ids": (lambda f: _over(f, segment_ids=_x(TOKENS, dtype=np.int32)),),
        "cu_seqlens": (lambda f: f(ROW, cu_seqlens=np.array([0, 5]), segment_ids=_x(TOKENS, dtype=np.int32)),
            lambda f: _over(f, cu_seqlens=np.array([0, 5]))),
    },
    "recurrent": {
        "state": (_over, lambda f: _over(f, {}), lambda f: _over(f, f.init_state(0)),
            lambda f: _over(f, f.init_state((2, 2)))),
        "batch": (lambda f: _over(f, f.init_state(4), None),),
        "batch.state_indices": (lambda f: _over(f, f.init_state(4), (3, 3)),
            lambda f: _over(f, f.init_state(4), (0, 4))),
        "batch_shape": (lambda f: f.init_state("2"), lambda f: f.init_state((-1,)),
            lambda f: f.init_state(2.5)),
        "dtype": (lambda f: f.init_state(2, jnp.int8), lambda f: f.init_state(2, "wide")),
    },
    "attention": {
        "k_new": (lambda f: f(X, f.init_cache(ROWS, 3)), lambda f: f(X, nn.KVCache.init(ROWS, 8, 1, 12))),
        "segment_ids": (lambda f: f(X, _rows(f), segment_ids=IDS),),
        "batch": (lambda f: f(X, _pages(f)),),
        "cache": (_over, lambda f: _over(f, f.init_cache(2, 8)), lambda f: _over(f, _pages(f, batch_shape=3)),
            lambda f: _over(f, PagedKVCache.init(2, 4, 1, 12))),
        "page_table": (lambda f: _over(f, f.init_paged_cache(2, 8)),),
        "kv_input": (lambda f: _over(f, _pages(f), kv_input=ROW),),
        "bias": (lambda f: _over(f, _pages(f), bias=_x(TOKENS, TOKENS)),),
        "mask": (lambda f: _over(f, _pages(f), mask=_x(TOKENS, TOKENS, dtype=bool)),),
        "kv_padding_mask": (lambda f: _over(f, _pages(f), kv_padding_mask=_x(TOKENS, dtype=bool)),),
        "positions": (lambda f: _over(f, _pages(f), positions=np.arange(5)),),
        "inference": (lambda f: _over(f, _pages(f), inference="yes"),
            lambda f: _over(_attention(dropout_rate=0.5), _pages(f))),
        "padding_mask": (lambda f: f(X, _rows(f), padding_mask=np.array([[1, 0, 1, 1, 1]] * 2, bool)),),
        "attention": (lambda f: f.from_equinox(eqx.nn.Linear(2, 2, key=KEY)),),
        "batch_shape": (lambda f: f.init_cache("2", 8), lambda f: f.init_cache(-2, 8)),
        "max_length": (lambda f: f.init_cache(2, 0), lambda f: f.init_cache(2, 8.0)),
        "num_pages": (lambda f: f.init_paged_cache(0, 4),),
        "scales": (lambda f: _pages(f, scales="row"),),
        "dtype": (lambda f: f(X, _integers_of(_rows(f))), lambda f: _pages(f, dtype=jnp.int32))
        + tuple(lambda f, dtype=dtype: _rows(f, dtype=dtype)
            for dtype in (jnp.int8, "uint8", bool, "half-ish")),
    },
    "cross": {
        "kv_padding_mask": (lambda f: f(X, kv_input=MEMORY, kv_padding_mask=_x(ROWS, 7, dtype=np.int32)),
            lambda f: f(X, kv_input=MEMORY, kv_padding_mask=_x(ROWS, 5, dtype=bool))),
        "cache": (lambda f: f(X, _rows(f), kv_input=MEMORY),),
        "batch": (lambda f: _over(f, _pages(f)),),
    },
    "both ways": {
        "cache": (lambda f: f(X, _rows(f)), lambda f: f(_x(ROWS, 1, EMBED), _rows(f))),
        "batch": (lambda f: _over(f, _pages(f)),),
    },
    "conv": {
        "state": (lambda f: f(CHANNELS, {}), lambda f: f(CHANNELS, _x(2, 3, 6, dtype=np.int32)),
            lambda f: _step(f, state={}),
            lambda f: _step(f, state=_x(2, 4, 6))),
        "initial_state": (lambda f: f(CHANNELS, _x(3, 3, 6)),),
        "segment_ids": (lambda f: f(CHANNELS, segment_ids=_x(2, 5)),
            lambda f: f(CHANNELS, segment_ids=[[0] * 5] * 2)),
        "cu_seqlens": (lambda f: f(_x(5, 6), cu_seqlens=[0, 5]),
            lambda f: f(_x(5, 6), cu_seqlens=np.array([0.0, 5.0])),
            lambda f: f(CHANNELS, cu_seqlens=np.array([0, 5]))),
        "batch_shape": (lambda f: f.init_state("2"),),
        "dtype": (lambda f: f.init_state(2, jnp.int8),),
        "x": (lambda f: _step(f, [0.0] * 6), lambda f: _step(f, _x(2, 5), _x(2, 3, 6))),
        "state_indices": tuple(lambda f, slots=slots: _step(f, state_indices=slots)
                               for slots in (_x(2), np.array([1, 1]), np.array([4, -1]), np.array([1]))),
    },
    "norm": {
        "z": tuple(lambda f, z=z: f(_x(2, 6), z) for z in ([[0.0] * 6] * 2, _x(2, 6, dtype=bool), _x(6))),
    },
}  # fmt: skip

# Constructors: the options that make the layer, and one that is wrong -> the argument that the error names.
MAKE: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (nn.MultiHeadAttention, {"num_heads": 4}),
    "mamba": (nn.Mamba1Mixer, {}),
    "mamba2": (nn.Mamba2Mixer, {"head_dim": 12}),
    "mamba3": (nn.Mamba3Mixer, {"head_dim": 12}),
    "gla": (nn.GatedLinearAttention, {"num_heads": 4}),
    "lightning": (nn.LightningAttention, {"num_heads": 4}),
    "kimi": (nn.KimiDeltaAttention, {"num_heads": 2, "head_dim": 8}),
    "qwen3-next": (nn.GatedDeltaNet, {"num_k_heads": 2, "head_dim": 8}),
    "rwkv6": (nn.RWKV6TimeMix, {"num_heads": 2}),
    "rwkv7": (nn.RWKV7TimeMix, {"head_dim": 8}),
}
NO_SIZES = (0, -1, 2.5, "16", None, True)
NO_DTYPES = (jnp.int8, "floatish", jnp.complex64, jnp.float8_e4m3fn)
SIZE, FACTOR, FLAG, EPS = (0, 2.5, "4"), (0, 0.3, "2"), ("no",), (-1.0, "small", None)
# For each layer arguments and the values that are wrong for them.
OPTIONS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "all": [
        ("embed_dim", NO_SIZES),
        ("key", (None, 0, np.zeros(2, np.float32), np.zeros((3, 2), np.uint32))),
        ("dtype", NO_DTYPES),
        ("compute_dtype", (*NO_DTYPES, jnp.int32)),
        ("platform", ("metal",)),
    ],
    "attention": [
        ("num_heads", (*NO_SIZES, 5)),
        ("num_kv_heads", (0, -2, 1.0, "2", 3)),
        ("head_dim v_head_dim", (0, -8, 2.0, "8")),
        ("kv_embed_dim v_embed_dim output_size", (0, 2.0, "24")),
        ("rope", (True, 10000.0, "yarn", nn.RotaryEmbedding(8), {"theta": 1e4})),
        ("causal", ("no", None, 1)),
        ("qk_norm", ("no", None, 1, "each", ("all",))),
        ("qk_norm_eps", (-1.0, float("nan"), "small", None)),
        ("use_qkv_bias", ("yes", None, (True, False), (True, 1, True))),
        ("alibi", ("bloom", 1)),
        ("use_output_bias deterministic", ("yes", None)),
        ("sinks", ("yes", 2)),
        ("output_gate", ("silu", 1)),
        ("sliding_window", (0, -3, "wide", 2.5, (1, 2, 3), (-1, 0), True)),
        ("logits_soft_cap", (0.0, -1.0, "30", float("nan"))),
        ("softmax_scale", ("auto", float("inf"))),
        ("dropout_rate", (1.0, -0.1, "0.1", float("nan"))),
    ],
    "recurrent": [("state_dtype", ("int8", "floatish"))],
    "mamba": [
        ("state_size conv_width inner_dim dt_rank", SIZE),
        ("expand", (*FACTOR, None)),
        ("use_conv_bias use_bias inner_norms", FLAG),
        ("inner_norm_eps", EPS),
    ],
    "mamba2": [
        ("state_size conv_width", SIZE),
        ("head_dim", (*SIZE, 7)),
        ("num_groups", (0, 3)),
        ("expand", FACTOR),
        ("dt_limit", ((1.0,), "wide", (2.0, 1.0))),
        ("use_norm norm_before_gate use_conv_bias use_bias", FLAG),
        ("norm_group_size", (0, 7)),
        ("multipliers", ((1.0, 2.0), [1.0] * 5)),
        ("norm_eps", EPS),
    ],
    "mamba3": [
        ("head_dim", (*SIZE, 7)),
        ("state_size mimo_rank", SIZE),
        ("num_groups", (0, 3)),
        ("expand", FACTOR),
        ("rope_fraction", (0.0, 1.5, "all", None)),
        ("use_norm", FLAG),
        ("norm_eps min_rate", EPS),
    ],
    "gla": [
        ("num_heads conv_width gate_low_rank_dim", SIZE),
        ("num_kv_heads", (0, 3)),
        ("expand_k expand_v", FACTOR),
        ("use_short_conv use_conv_bias output_gate", FLAG),
        ("gate_logit_normalizer", (0, -1.0, "16", None)),
        ("gate_min", ("low", float("nan"))),
        ("norm_eps", EPS),
    ],
    "lightning": [
        ("num_heads", (*SIZE, 5)),
        ("head_dim num_layers", SIZE),
        ("layer_index", (-1, 1, 0.5, "first", np.zeros(2, np.int32))),
        ("norm_eps", EPS),
    ],
    "kimi": [
        ("num_heads", (*SIZE, None)),
        ("num_v_heads head_dim v_head_dim conv_width", SIZE),
        ("use_conv_bias use_gate_bias allow_neg_eigval", FLAG),
        ("lower_bound", (1.0, "low")),
        ("norm_eps", EPS),
    ],
    "qwen3-next": [
        ("num_k_heads", (*SIZE, None)),
        ("num_v_heads head_dim v_head_dim conv_width", SIZE),
        ("allow_neg_eigval", FLAG),
        ("norm_eps", EPS),
    ],
    "rwkv6": [
        ("num_heads", (*SIZE, None)),
        ("expand_k expand_v", FACTOR),
        ("proj_low_rank_dim gate_low_rank_dim", SIZE),
        ("norm_eps", EPS),
    ],
    "rwkv7": [
        ("head_dim", (*SIZE, 5)),
        ("v_head_dim decay_low_rank_dim a_low_rank_dim v_low_rank_dim gate_low_rank_dim", SIZE),
        ("value_residual", FLAG),
        ("norm_eps", (-1.0, "small")),
    ],
}

ROPE_X = np.ones((2, 4, 1, 8), np.float32)
CACHES: dict[str, Any] = {"mixers": [], "num_pages": 2, "page_size": 4, "num_slots": 2}
_KV: dict[str, Any] = {"batch_shape": 2, "max_length": 8, "num_kv_heads": 2, "head_dim": 4}
# Other constructors and calls: what is called, with what, and which values are wrong for which argument.
PARTS: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "conv": (
        nn.ShortConvolution,
        {"channels": 6, "key": KEY},
        {"channels": (0,), "width": ("4",), "activation": ("gelu",), "use_bias": FLAG, "key": (1,)} | {"dtype": ("int8",)},
    ),
    "norm": (
        nn.GatedRMSNorm,
        {"features": 6},
        {"features": (0, "6"), "group_size": (0,), "activation": ("tanh",), "eps": (-1.0,), "dtype": (jnp.int32,)}
        | dict.fromkeys(("norm_before_gate", "use_weight"), FLAG),
    ),
    "rope": (
        nn.RotaryEmbedding,
        {"head_dim": 8},
        {"head_dim": (0, "64"), "rotary_dim": (4.0, 10), "theta": (0.0, "1e4"), "interleaved": FLAG} | {"scaling": (2.0, {"type": "yarn"})},
    ),
    "rope's call": (
        nn.RotaryEmbedding(8),
        {"x": ROPE_X},
        {"x": (ROPE_X.tolist(), ROPE_X.astype(int), ROPE_X[0, :, 0], ROPE_X[..., :6]), "offset": (1.5, np.zeros(3, int), [0, 0])}
        | {"positions": ([0, 1, 2, 3], np.arange(3), np.arange(4.0), np.zeros((3, 2, 4), int), np.zeros((2, 4, 1), int))},
    ),
    "linear scaling": (nn.LinearScaling, {}, {"factor": (0.0, "2")}),
    "llama3 scaling": (nn.Llama3Scaling, {}, {"original_max_position": (0,)}),
    "yarn": (
        nn.YarnScaling,
        {"factor": 2.0, "original_max_position": 4096},
        {"factor": (-1.0,), "original_max_position": (None,), "beta_fast": (0.0,), "truncate": FLAG},
    ),
    "cache": (
        nn.KVCache.init,
        _KV,
        {"batch_shape": ("2",), "max_length": (0,), "num_kv_heads": (0,), "head_dim": (4.0,), "dtype": (jnp.int8,)},
    ),
    "caches": (nn.CacheState.init, CACHES, {"mixers": (3,), "num_slots": (0,), "batch_shape": ("2",)}),
}  # fmt: skip
OTHERS: dict[str, tuple[Any, str]] = {
    "norm, groups": (lambda: nn.GatedRMSNorm(6, group_size=4), "features"),
    "rope, odd": (lambda: nn.RotaryEmbedding(7), "rotary_dim"),
    "llama3 scaling": (lambda: nn.Llama3Scaling(8.0, 4.0, 1.0), "high_freq_factor"),
    "cache, mixers": (lambda: nn.CacheState.init(**CACHES | {"mixers": [eqx.nn.Linear]}), r"mixers\[0\]"),
}


_NEW = np.ones((2, 3, 2, 4), np.float32)
_INTEGERS = _NEW.astype(int)
APPENDS: dict[str, tuple[Any, ...]] = {
    "k_new": ([0.0], _INTEGERS, np.ones((2, 3, 2, 5), np.float32)),
    "v_new": ([0.0], _INTEGERS, np.ones((2, 4, 2, 4), np.float32)),
    "new_lengths": ([1, 2], np.array([1.0, 2.0]), np.array([1, 2, 3]), np.array([-1, 2]), np.array([4, 0])),
    "mask": ([True], np.ones((2, 3), int), np.ones((2, 4), bool), np.ones((2, 2, 3), bool)),
}


def _calls():
    for name in ("attention", *RECURRENT, "cross", "both ways", "conv", "norm"):
        own = ("all", "recurrent") if name in RECURRENT else ("all", name) if name == "attention" else (name,)
        for group in own:
            yield from (
                pytest.param(name, a, calls, id=f"{name}: {a} of {group}")
                for a, calls in CALLS[group].items()
            )


def _options():
    for name in MAKE:
        own = OPTIONS["all"] + OPTIONS[name] + ([] if name == "attention" else OPTIONS["recurrent"])
        yield from ((name, argument, wrong) for arguments, wrong in own for argument in arguments.split())


def _says(call, argument):
    with pytest.raises(ValueError) as caught:
        call()
    # The argument, what was expected, what came, and what to do about it or about what.
    form = rf"{argument}: expected .+ received .+[;,.]"
    assert re.match(form, str(caught.value), re.DOTALL), str(caught.value)


def _values():
    for name in ("attention", *RECURRENT, "cross", "conv", "norm"):
        own = ["recurrent" if name in RECURRENT else name]
        for group in own if name in ("cross", "conv", "norm") else ["all", *own]:
            for x, tables in ((X, VALUES), (ROW, PACKED)):
                yield from (
                    pytest.param(name, x, argument, values, id=f"{name}: {argument} of {group}, {x.ndim}")
                    for argument, values in tables.get(group, {}).items()
                )


@pytest.mark.few(30)
@pytest.mark.parametrize("name, x, argument, values", list(_values()))
def test_values(name, x, argument, values):
    layer = _layer(name)
    for wrong in values(layer):
        _says(lambda wrong=wrong: layer(**{"x": x, argument: wrong}), argument)


@pytest.mark.few(30)
@pytest.mark.parametrize("name, argument, calls", list(_calls()))
def test_calls(name, argument, calls):
    for call in calls:
        _says(lambda call=call: call(_layer(name)), re.escape(argument))


@pytest.mark.parametrize(
    "name, argument, values", [pytest.param(*c, id=f"{c[0]}: {c[1]}") for c in _options()]
)
def test_constructors(name, argument, values):
    make, options = MAKE[name]
    for wrong in values:
        given = {"embed_dim": EMBED, "key": KEY} | options | {argument: wrong}
        _says(lambda given=given: eqx.filter_eval_shape(lambda: make(**given)), re.escape(argument))


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    make, options, values = PARTS[name]
    for argument, several in values.items():
        for wrong in several:
            _says(lambda argument=argument, wrong=wrong: make(**options | {argument: wrong}), argument)


@pytest.mark.parametrize("case", OTHERS)
def test_others(case):
    call, argument = OTHERS[case]
    _says(call, argument)


@pytest.mark.parametrize("argument", APPENDS)
def test_appends(argument):
    for wrong in APPENDS[argument]:
        given = {"k_new": _NEW, "v_new": _NEW, argument: wrong}
        _says(lambda given=given: nn.KVCache.init(2, 8, 2, 4).append(**given), argument)
