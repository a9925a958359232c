"""The public attention operations: how they compose with JAX, merging, and those beside FlashAttention."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import (
    causal,
    check,
    INTERPRET,
    normal,
    qkv,
    quick,
)
from tests.attention.inner import Backend, cudnn, DeviceFacts, LSE_NAME, OUT_NAME
from tests.tolerances import assert_close

# How it composes


def loop(function, *args):
    """`jax.vmap`, by hand."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[function(*row) for row in zip(*args)])


def assert_maps(function, args, axes):
    """`jax.vmap` over the axes given, against a loop."""
    one = quick(function)
    size = next(x.shape[0] for x, axis in zip(args, axes) if axis == 0)
    rows = [x if axis == 0 else jnp.stack([x] * size) for x, axis in zip(args, axes)]
    assert_close(quick(jax.vmap(function, in_axes=tuple(axes)))(*args), loop(one, *rows))


@pytest.mark.few(1)
def test_vmap(flash):
    a, module = qkv(3), flash(causal=True)
    call = lambda q, k, v: module(q, k, v)
    q, k, v = a["q"], a["k"], a["v"]
    assert_maps(call, (q, k, v), (0, 0, 0))
    assert_maps(call, (q, k[0], v[0]), (0, None, None))
    assert_maps(call, (q[0], k, v[0]), (None, 0, None))
    one = quick(call)
    expected = loop(one, q, k, v)
    moved = quick(jax.vmap(call, in_axes=1, out_axes=2))(*(jnp.moveaxis(x, 0, 1) for x in (q, k, v)))
    assert_close(moved, jnp.moveaxis(expected, 0, 2))
    nested = quick(jax.vmap(jax.vmap(call, in_axes=(0, None, None)), in_axes=(None, 0, 0)))(q, k, v)
    assert_close(
        nested, jnp.stack([loop(one, q, jnp.stack([x] * 3), jnp.stack([y] * 3)) for x, y in zip(k, v)])
    )


@pytest.mark.slow
def test_vmap_of_what_is_small(flash):
    """Bias, mask, segments, sinks, slopes, offsets and dropout keys, each mapped or not."""
    a = qkv(3)
    bias, sinks, mask = (
        normal(5, 3, 4, 20, 26),
        normal(6, 3, 4),
        jnp.asarray(np.random.default_rng(0).random((3, 1, 20, 26)) < 0.8),
    )
    offsets, keys, ids = (
        jnp.arange(3),
        jax.random.split(jax.random.key(0), 3),
        jnp.arange(60).reshape(3, 20) // 7,
    )
    module = flash(causal=True, dropout_rate=0.2)

    def call(q, k, v, bias, sinks, mask, offset, key, ids):
        more = dict(bias=bias, sinks=sinks, alibi_slopes=sinks, mask=mask, q_offset=offset, key=key)
        return module(q, k, v, segment_ids=ids, kv_segment_ids=jnp.arange(26) // 3, **more)

    args = (a["q"], a["k"], a["v"], bias, sinks, mask, offsets, keys, ids)
    for shared in ((), (3,), (4, 7), (5, 6), (8,), (3, 4, 5, 6, 7, 8), (0, 1, 2, 3, 4, 5, 7, 8)):
        assert_maps(
            call,
            [x[0] if n in shared else x for n, x in enumerate(args)],
            [None if n in shared else 0 for n in range(9)],
        )


@pytest.mark.slow
def test_vmap_of_grad_and_grad_of_vmap(flash):
    a = dict(qkv(3), bias=normal(5, 3, 4, 20, 1), sinks=normal(6, 3, 4), alibi_slopes=normal(7, 3, 4))
    weight = normal(8, 20, 4, 16)
    module: Any = flash(causal=True)
    loss = lambda a: jnp.sum(module(**a) * weight)
    # What is not mapped gets a gradient for each example, or their sum.
    small = ("bias", "sinks", "alibi_slopes", "k")
    axes = {name: None if name in small else 0 for name in a}
    shared = {name: x[0] if name in small else x for name, x in a.items()}
    same = {name: jnp.stack([x[0]] * 3) if name in small else x for name, x in a.items()}
    one = quick(jax.grad(loss))
    rows = [one({name: x[n] for name, x in same.items()}) for n in range(3)]
    expected = {name: jnp.stack([row[name] for row in rows]) for name in a}
    each = quick(jax.vmap(jax.grad(loss), in_axes=(axes,)))(shared)
    total = quick(jax.grad(lambda a: jnp.sum(jax.vmap(loss, in_axes=(axes,))(a))))(shared)
    for name, gradient in expected.items():
        assert_close(each[name], gradient, kind="gradient", name=name)
        assert_close(total[name], gradient.sum(0) if name in small else gradient, kind="gradient", name=name)


@pytest.mark.slow
def test_one_launch_however_it_is_mapped(launches):
    module: Any = ejx.FlashAttention(causal=True, platform=INTERPRET)
    a = qkv(2, 3)
    call = lambda q, k, v: module(q, k, v)
    jax.block_until_ready(jax.vmap(jax.vmap(call))(a["q"], a["k"], a["v"]))
    jax.block_until_ready(jax.jit(jax.vmap(call, in_axes=(0, None, None)))(a["q"], a["k"][0], a["v"][0]))
    jax.block_until_ready(
        jax.vmap(jax.vmap(call, in_axes=(0, None, None)), in_axes=(None, 0, 0))(
            a["q"][0], a["k"][:, 0], a["v"][:, 0]
        )
    )
    assert launches == ["forward"] * 3
    launches.clear()
    gradient = jax.grad(lambda q, k, v, bias: jnp.sum(module(q, k, v, bias=bias)), (0, 1, 2, 3))
    jax.block_until_ready(
        jax.jit(jax.vmap(jax.vmap(gradient, in_axes=(0, 0, 0, None))))(
            a["q"], a["k"], a["v"], normal(5, 2, 20, 26)
        )
    )
    assert sorted(launches) == ["bias_gradient", "forward", "key_gradient", "query_gradient"]


def test_scan_and_named_residuals(launches):
    """Of what a layer computes, only the kernel's two outputs have to be kept for the kernel not to run again."""
    module = ejx.FlashAttention(causal=True, platform=INTERPRET)
    x, weights = normal(0, 20, 2, 16), normal(1, 3, 16, 16) / 4

    def layer(x, w):
        h = jnp.tanh(x @ w)
        return x + module(h, h, h) @ w, None

    def loss(policy, weights):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0] ** 2)

    policies = jax.checkpoint_policies
    plain = lambda weights: jnp.sum(functools.reduce(lambda x, w: layer(x, w)[0], weights, x) ** 2)
    expected = jax.block_until_ready(jax.grad(plain)(weights))
    counts = {}
    for name, policy in (
        ("named", policies.save_only_these_names(OUT_NAME, LSE_NAME)),
        ("nothing", policies.nothing_saveable),
    ):
        launches.clear()
        gradient = jax.block_until_ready(jax.jit(jax.grad(functools.partial(loss, policy)))(weights))
        assert_close(gradient, expected, kind="gradient")
        counts[name] = {kernel: launches.count(kernel) for kernel in set(launches)}
    assert counts["named"] == {"forward": 3, "key_gradient": 3, "query_gradient": 3}
    assert counts["nothing"] == {"forward": 6, "key_gradient": 3, "query_gradient": 3}


def test_forward_mode_is_refused_not_wrong(flash):
    a, module = qkv(), flash(causal=True)
    call = lambda q: module(q, a["k"], a["v"])
    biased = lambda q: module(q, a["k"], a["v"], bias=normal(5, 4, 20, 26))
    for differentiate in (
        lambda: jax.jvp(call, (a["q"],), (a["q"],)),
        lambda: jax.jit(lambda q: jax.jvp(jax.vmap(call), (q[None],), (q[None],)))(a["q"]),
        lambda: jax.jacfwd(call)(a["q"]),
        lambda: jax.jvp(jax.vmap(biased), (a["q"][None],), (a["q"][None],)),
    ):
        with pytest.raises(
            ejx.UnsupportedError, match=r"flash_attention .* forward mode .*\n.*ejkernel_eqx\.Attention"
        ):
            differentiate()


# Merging


@pytest.mark.few(1)
def test_merging_parts_of_the_keys(flash):
    arrays = dict(qkv(2, t=20, s=40), sinks=normal(6, 4, 2))

    def merged(q, k, v, sinks):
        part = flash(causal=True)
        # The queries sit on the last of the 40 keys; the middle part is seen by nobody, through its lengths.
        cuts = ((0, 13, {}), (13, 40, {}), (0, 40, dict(kv_lengths=jnp.int32(0))))
        parts = [
            part(q, k[:, a:b], v[:, a:b], q_offset=20 - a, return_lse=True, **more) for a, b, more in cuts
        ]
        return ejx.merge_attention(parts[0], parts[2], parts[1], sinks=sinks)

    check(merged, arrays, causal(20, 40))


def test_merging_nothing():
    out, lse = jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf)
    sinks = jnp.asarray([0.5, -1.0, 2.0])
    merge: Any = ejx.merge_attention
    merged, total = merge((out, lse), (out, lse))
    assert not np.asarray(merged).any() and (np.asarray(total) == -np.inf).all()
    assert_close(merge((out, lse), sinks=sinks)[1], np.broadcast_to(sinks, (2, 3)))
    gradient = jax.grad(lambda out, lse: jnp.sum(merge((out, lse), (out, lse), return_lse=False)), (0, 1))(
        out + 1, lse
    )
    assert not any(np.asarray(g).any() or np.isnan(g).any() for g in gradient)
    half = merge((out.astype(jnp.bfloat16), lse), return_lse=False)
    assert half.dtype == jnp.bfloat16


# Attention and ScaledDotProductAttention


@pytest.mark.slow
def test_attention_returns_the_weights_it_used():
    arrays = dict(qkv(2, 3), sinks=normal(6, 4), bias=normal(7, 1, 4, 20, 26))
    module: Any = ejx.Attention(causal=True, logits_soft_cap=3.0)
    out, weights = quick(lambda a: module(**a))(arrays)
    check(
        lambda **a: (
            module(**a)[0],
            ejx.FlashAttention(causal=True, logits_soft_cap=3.0)(**a, return_lse=True)[1],
        ),
        arrays,
        causal(20, 26),
        cap=3.0,
    )
    assert weights.shape == (2, 3, 4, 20, 26) and not np.asarray(weights)[..., ~causal(20, 26)].any()
    values = jnp.repeat(arrays["v"], 2, axis=-2)
    assert_close(jnp.einsum("...hts,...shv->...thv", weights, values), out)
    assert (np.asarray(weights).sum(-1) < 1).all()  # the sinks took the rest
    without = np.asarray(module(arrays["q"], arrays["k"], arrays["v"])[1])
    np.testing.assert_allclose(without.sum(-1), 1, rtol=1e-5)
    assert module(*(arrays[n].astype(jnp.bfloat16) for n in "qkv"))[1].dtype == jnp.bfloat16


def test_attention_has_every_derivative(enable_x64):
    arrays = dict(
        qkv(t=3, s=4, heads=2, kv_heads=1, d=3, v=2, dtype=jnp.float64), sinks=normal(6, 2, dtype=jnp.float64)
    )
    module: Any = ejx.Attention(causal=True, logits_soft_cap=2.0)
    loss = lambda q: jnp.sum(module(**dict(arrays, q=q))[0] ** 2)
    q, direction, step = arrays["q"], normal(8, 3, 2, 3, dtype=jnp.float64), 1e-4
    value, slope = quick(lambda q: jax.jvp(loss, (q,), (direction,)))(q)
    assert_close(slope, jnp.vdot(quick(jax.grad(loss))(q), direction))
    value_at = quick(loss)
    np.testing.assert_allclose(
        slope, (value_at(q + step * direction) - value_at(q - step * direction)) / (2 * step), rtol=1e-6
    )
    curvature = jnp.einsum("abcdef,abc,def", quick(jax.hessian(loss))(q), direction, direction)
    second = (value_at(q + step * direction) - 2 * value + value_at(q - step * direction)) / step**2
    np.testing.assert_allclose(curvature, second, rtol=1e-5)
    # So has the fast form on XLA, but in forward mode alone.
    flash: Any = ejx.FlashAttention(causal=True, logits_soft_cap=2.0, platform="xla")
    fast = lambda q: jnp.sum(flash(**dict(arrays, q=q)) ** 2)
    assert_close(quick(jax.hessian(fast))(q), quick(jax.hessian(loss))(q), kind="gradient")
    # A row that sees nothing has derivatives too: zero ones.
    hidden = lambda q: jnp.sum(module(**dict(arrays, q=q), q_offset=-10)[0])
    assert not np.asarray(quick(jax.jacfwd(hidden))(q)).any()


FLAGS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=3),
    "causal window": dict(is_causal=True, local_window_size=(4, 2)),
    "scale and bias": dict(scale=0.2, bias=normal(5, 2, 1, 20, 26)),
    "mask": dict(
        mask=jnp.asarray(np.random.default_rng(0).random((1, 4, 20, 26)) < 0.7).at[..., 0].set(True),
        is_causal=True,
    ),
    "lengths": dict(
        key_value_seq_lengths=jnp.asarray([26, 9], jnp.int32),
        query_seq_lengths=jnp.asarray([20, 13], jnp.int32),
    ),
    "residual": dict(return_residual=True, is_causal=True),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FLAGS)
def test_the_call_of_jax_nn(name):
    a, flags = qkv(2), dict(FLAGS[name])
    residual = flags.pop("return_residual", False)
    ours = lambda q, k, v: ejx.ScaledDotProductAttention()(q, k, v, return_residual=residual, **flags)
    theirs = lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, implementation="xla", return_residual=residual, **flags
    )
    real = np.ones((2, 20, 1, 1), bool)
    if name == "lengths":
        real[1, 13:] = False  # theirs gives the mean of the values there, ours zero
    weight = jnp.where(real, normal(8, 2, 20, 4, 16), 0)
    args = (a["q"], a["k"], a["v"])
    expected, actual = quick(theirs)(*args), quick(ours)(*args)
    if residual:
        assert_close(actual[1], expected[1])
        expected, actual = expected[0], actual[0]
    assert_close(jnp.where(real, actual, 0), jnp.where(real, expected, 0))
    assert not np.asarray(actual)[~np.broadcast_to(real, actual.shape)].any()

    def gradient(function):
        first = lambda result: result[0] if residual else result
        return quick(jax.grad(lambda *args: jnp.sum(first(function(*args)) * weight), (0, 1, 2)))(*args)

    grads = gradient(ours), gradient(theirs)
    for name, g, h in zip("qkv", *grads):
        # The other side is float32 as well: both err.
        assert_close(g, h, kind="gradient", name=name)


def test_explain_says_why_not():
    arrays = qkv(2)
    choices = ejx.explain(ejx.FlashAttention(causal=True), **arrays).choices
    assert len(choices) == 1 and choices[0].operation == "flash_attention"
    rejected = dict(choices[0].rejected)
    if choices[0].platform == "xla":
        assert set(rejected) == {"cuda", "triton"} and all(
            "needs a GPU" in reason for reason in rejected.values()
        )
    text = str(ejx.explain(ejx.FlashAttention(causal=True), **arrays))
    assert "T20" in text and "float32" in text and "causal" in text and choices[0].config in text


def test_explain_finds_every_kernel_of_a_model():
    model = {"a": ejx.FlashAttention(), "b": [ejx.FlashAttention(causal=True), ejx.Attention()]}
    paths = [choice.path for choice in ejx.explain(model).choices]
    assert paths == ["['a']", "['b'][0]", "['b'][1]"]


def test_the_rules_of_cudnn():
    """Of the vendor's library only what it computes exactly as written is used; facts of devices stand in for the devices."""
    facts = lambda capability: DeviceFacts(Backend.GPU, "GPU", "nvidia", capability, cudnn=(9, 30, 0))
    hopper, ampere = facts("9.0"), facts("8.0")

    def reason(device=hopper, t=64, s=64, d=64, v=64, dtype=jnp.bfloat16, module=None, **call):
        module = ejx.FlashAttention(causal=True) if module is None else module
        found = []
        shape = lambda *x: jax.ShapeDtypeStruct(x, dtype)
        with ejx.dispatch.on_selection(found.append):
            eqx.filter_eval_shape(module, shape(2, t, 4, d), shape(2, s, 2, d), shape(2, s, 2, v), **call)
        return cudnn.unsupported(found[0].problem, device)

    full, windowed = ejx.FlashAttention(), ejx.FlashAttention(causal=True, sliding_window=5)
    supported = [
        dict(), dict(module=full, t=32), dict(dtype=jnp.float16), dict(d=256, v=256), dict(module=windowed, t=32, q_offset=0),
        dict(s=60, q_offset=0), dict(module=windowed, s=60, q_offset=0),
    ]  # fmt: skip
    for request in supported:
        assert reason(**request) is None, request
    refused = {
        "top-left": [dict(t=32), dict(q_offset=3), dict(module=windowed, t=32), dict(module=windowed, q_offset=-1)],
        "bfloat16 and float16": [dict(dtype=jnp.float32)],
        "head dims": [dict(d=20, v=20), dict(d=264, v=264), dict(device=ampere, d=136, v=136)],
        "V = D": [dict(v=32)],
        "return_lse": [dict(return_lse=True)],
        "deterministic": [dict(module=ejx.FlashAttention(deterministic=True))],
        "soft_cap": [dict(module=ejx.FlashAttention(logits_soft_cap=3.0))],
        "dropout": [dict(module=ejx.FlashAttention(dropout_rate=0.3), key=jax.random.key(0))],
        "without keys to the right":
            [dict(module=ejx.FlashAttention(sliding_window=(3, 3))), dict(module=ejx.FlashAttention(sliding_window=(None, 10)))],
        "mask": [dict(mask=jnp.ones((64, 64), bool))],
        "bias": [dict(bias=jnp.ones((64,)))],
        "sinks": [dict(sinks=jnp.ones((4,)))],
        "ALiBi": [dict(alibi_slopes=jnp.ones((4,)))],
        "segment": [dict(segment_ids=jnp.zeros((64,), int))],
        "per-row": [dict(q_offset=jnp.zeros((2,), int)), dict(kv_lengths=jnp.ones((2,), int))],
        "empty": [dict(module=full, t=0)],
        "without keys": [dict(module=windowed, s=58, q_offset=0)],
    }  # fmt: skip
    for words, requests in refused.items():
        for request in requests:
            assert words in (reason(**request) or ""), (words, request, reason(**request))
