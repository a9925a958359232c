"""Operations as functions: what their modules give, whatever is around the call, and one mechanism for all of them."""

import concurrent.futures
import dataclasses
import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import functional
from ejkernel_eqx.dispatch import memory_cache
from tests import functional_stub
from tests.attention.dense import normal
from tests.compilations import compilations

INTERNAL: Any = functional
OPERATIONS = functional_stub.operations()
by_operation = pytest.mark.parametrize("cls", OPERATIONS, ids=lambda cls: cls.operation)


def cache() -> ejx.PagedKVCache:
    pages = ejx.PagedKVCache.init(3, 4, 2, 8).append(normal(1, 9, 2, 8), normal(2, 9, 2, 8), jnp.arange(9))
    return pages.bind(jnp.array([[0, 1, 2]]), jnp.array([9]))


q, k, v = (normal(seed, 6, 2, 8) for seed in range(3))
g, beta = -jnp.exp(normal(3, 6, 2, 8)), jax.nn.sigmoid(normal(4, 6, 2))
x, dt, A = normal(5, 6, 4), jax.nn.softplus(normal(6, 6, 4)), -jnp.exp(normal(7, 4, 3))
B, C = normal(8, 6, 3), normal(9, 6, 3)
starts = {"query_start_loc": jnp.array([0, 6])}
CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "absorbed_latent_attention": (
        dict(softmax_scale=0.2),
        (normal(1, 6, 2, 8), normal(2, 6, 5), normal(3, 6, 3)),
        dict(kv_lengths=4),
    ),
    "attention": (dict(causal=True), (q, k, v), {}),
    "block_sparse_attention": (dict(block_size=4), (q, k, v), dict(block_map=np.eye(2, dtype=bool))),
    "causal_conv1d": (dict(activation="silu"), (x, normal(1, 4, 3)), {}),
    "delta_product": (
        dict(reverse=True),
        (q, jnp.stack([k, q], 1), jnp.stack([v, k], 1), jnp.stack([beta, 1 - beta], 1)),
        dict(g=g[..., 0]),
    ),
    "delta_rule": (dict(use_qk_l2norm=True), (q, k, v, beta), {}),
    "dplr_delta_rule": (dict(scale=0.3), (q, k, v, q / 3, k / 3, g), {}),
    "flash_attention": (dict(causal=True, sliding_window=3), (q, k, v), dict(return_lse=True)),
    "gated_delta_rule": (dict(reverse=True), (q, k, v, g[..., 0], beta), {}),
    "gated_linear_attention": (dict(scale=0.3), (q, k, v, g), {}),
    "gated_rms_norm": (dict(activation="sigmoid", eps=1e-3), (x, dt), {}),
    "grouped_matmul": (
        dict(activation="silu"),
        (x, normal(1, 2, 4, 3), jnp.array([2, 3])),
        dict(up=normal(2, 2, 4, 3)),
    ),
    "kernel_delta_attention": (dict(use_qk_l2norm=True), (q, k, v, g, beta), {}),
    "lightning_attention": (dict(slopes="fla"), (q, k, v), {}),
    "linear_attention": (dict(normalize=True), (jnp.exp(q), jnp.exp(k), v), {}),
    "linear_cross_entropy": (dict(z_loss=0.1), (x, np.arange(6) % 5 - 1, normal(1, 5, 4)), {}),
    "linear_divergence": (
        dict(temperature=2.0),
        (x, normal(1, 5, 4), ejx.Teacher.from_logits(normal(2, 6, 5))),
        {},
    ),
    "mean_pooling": (dict(chunk_size=2, normalize=True), (x,), dict(lengths=3)),
    "multi_head_latent_attention": (
        dict(causal=True),
        (normal(1, 6, 2, 8), normal(2, 6, 2, 5), normal(3, 6, 3), normal(4, 6, 2, 4)),
        dict(return_lse=True),
    ),
    "matmul": (dict(activation="silu"), (x, normal(1, 3, 4)), dict(norm=True)),
    "scaled_matmul": (dict(preferred_element_type="bfloat16"), (x, ejx.quantise(normal(1, 3, 4), "fp8")), {}),
    "rotary_heads": (dict(interleaved=True), (q, k, normal(1, 6, 2), normal(2, 6, 2)), {}),
    "residual_rms_norm": (dict(eps=1e-3), (x, dt, normal(1, 4)), {}),
    "ring_attention": (
        dict(axis_name="sequence", causal=True, order="zigzag"),
        (q, k, v),
        dict(return_lse=True),
    ),
    "native_sparse_attention": (
        dict(block_size=2, num_blocks=2, sliding_window=3),
        (q, k, v, normal(1, *q.shape[:2], 3)),
        dict(return_indices=True),
    ),
    "paged_native_sparse_attention": (
        dict(block_size=2, num_blocks=2, sliding_window=3),
        (q, normal(1, *q.shape[:2], 3), cache(), ejx.PagedKVCache.init(3, 2, 2, 8)),
        starts,
    ),
    "paged_attention": (dict(softmax_scale=0.2), (q[:1], cache()), dict(return_lse=True)),
    "prefill_paged_attention": (dict(sliding_window=4), (q, cache()), starts),
    "ragged_decode_attention": (dict(softmax_scale=0.2), (q[:1], k[None], v[None], 1, 5), {}),
    "ragged_paged_attention": (dict(append=True), (q, cache(), k, v), starts),
    "recurrent": (dict(cell="gru"), (x, normal(1, 6, 2)), dict(weight_ih=normal(2, 6, 4))),
    "rwkv7": (dict(reverse=True), (q, g, k, v, k / 3, g), {}),
    "scaled_dot_product_attention": (dict(deterministic=True), (q, k, v), dict(is_causal=True)),
    "state_space_v1": (dict(dt_softplus=True), (x, dt, A, B, C), {}),
    "state_space_v2": (
        dict(norm="whole"),
        (q, dt[:, :2], A[:2, 0], B[:, None], C[:, None]),
        dict(norm_weight=normal(1, 2, 8)),
    ),
    "state_space_v3": (
        dict(interleaved=False),
        (q, dt[:, :2], g[..., 0], k[:, None], q[:, None], dt[:, 2:], q[..., :2]),
        {},
    ),
    "unified_attention": (dict(logits_soft_cap=2.0), (q, cache()), starts | dict(alibi_slopes=jnp.ones(2))),
}


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_operation_has_its_function():
    """Operations are those that the package registers, and not a test."""
    registered = {
        operation
        for operation in ejx.kernel_registry.list_operations()
        for i in ejx.kernel_registry.ordered(operation)
        if str(i.target).startswith("ejkernel_eqx.")
    }
    assert CALLS.keys() == {cls.operation for cls in OPERATIONS}
    assert {name for name in registered if not name.startswith("tests.")} == CALLS.keys()


@pytest.mark.few(3)
@by_operation
def test_gives_what_the_module_gives(cls):
    options, args, others = CALLS[cls.operation]
    expected = cls(**options)(*args, **others)
    same(getattr(ejx, cls.operation)(*args, **others, **options), expected)


@by_operation
def test_signature_and_documentation(cls):
    function = getattr(functional, cls.operation)
    parameters = inspect.signature(function).parameters
    call, options = (list(inspect.signature(f).parameters)[1:] for f in (cls.__call__, cls.__init__))
    assert set(parameters) == {*call, *options} - {"tune_for"}
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == call[: len(positional)]
    assert function.__name__ == cls.operation and cls.__name__ in function.__doc__
    assert "**Options:**" in function.__doc__ and "- `tune_for`" not in function.__doc__


def test_the_stub_is_that_of_the_classes():
    expected = functional_stub.stub()
    assert functional_stub.STUB.read_text(encoding="utf-8") == expected, "run python -m tests.functional_stub"


@pytest.mark.parametrize("name, part", [("attention", "Mask"), ("matmul", "Matmul")])
def test_a_package_with_the_name_of_an_operation_is_called_as_its_function(name, part):
    package: Any = importlib.import_module(f"ejkernel_eqx.{name}")
    assert getattr(ejx, name) is package and getattr(package, part) is getattr(ejx, part)
    function = getattr(functional, name)
    assert inspect.signature(package) == inspect.signature(function)
    options, args, others = CALLS[name]
    call = functools.partial(package, **options, **others)
    same(jax.jit(call)(*args), function(*args, **others, **options))


def test_transformations():
    def loss(attend, q, k, v):
        return (attend(q, k, v) ** 2).sum()

    module = ejx.FlashAttention(causal=True)
    function = functools.partial(ejx.flash_attention, causal=True)
    batch = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    for transformed in (
        lambda attend: jax.jit(attend)(q, k, v),
        lambda attend: jax.grad(functools.partial(loss, attend), (0, 1, 2))(q, k, v),
        lambda attend: jax.vmap(attend)(*batch),
    ):
        same(transformed(function), transformed(module))


def test_equal_options_are_compiled_once():
    attend = lambda **options: ejx.flash_attention(q, k, v, **options)
    attend(causal=True, softmax_scale=0.125)
    with compilations() as found:
        attend(softmax_scale=0.125, causal=True)
    assert not found
    with compilations() as found:
        attend(causal=True, softmax_scale=0.126)
    assert found


def test_modules_are_kept_up_to_a_number():
    INTERNAL._kept.cache_clear()
    for n in range(functional.MODULES_KEPT + 20):
        INTERNAL._module(ejx.GatedRMSNorm, {"eps": 1e-6 * (n + 1)})
    assert INTERNAL._kept.cache_info().currsize == functional.MODULES_KEPT
    before = INTERNAL._kept.cache_info().hits
    ejx.gated_rms_norm(x, eps=1e-6 * (functional.MODULES_KEPT + 20))
    assert INTERNAL._kept.cache_info().hits == before + 1


def test_threads():
    def call(n: int) -> Any:
        return ejx.flash_attention(q, k, v, causal=bool(n % 2), softmax_scale=0.1 + n % 3)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(12)))
    for n, out in enumerate(found):
        same(out, ejx.FlashAttention(bool(n % 2), softmax_scale=0.1 + n % 3)(q, k, v))


def chosen(**options: Any) -> ejx.Invocation:
    with ejx.recording() as found:
        jax.eval_shape(lambda: ejx.flash_attention(q, k, v, platform="xla", **options))
    (invocation,) = found
    return invocation


@pytest.fixture
def tiles() -> Any:
    """A configuration that nobody would choose."""
    usual = chosen().config
    return dataclasses.replace(usual, forward=type(usual.forward)(16, 32))


def test_what_is_open_around_a_call_counts(tiles):
    found = lambda **options: (chosen(**options).tier.value, chosen(**options).config)
    assert found()[0] != "overlay"
    with ejx.overlay_cache({"flash_attention": tiles}):
        assert found() == ("overlay", tiles)
    assert found()[0] != "overlay"
    assert found(config=tiles) == ("override", tiles)


def test_what_is_tuned_later_is_taken(tiles):
    """By calls that JAX has compiled before, too."""
    before, call = chosen(), lambda: ejx.flash_attention(q, k, v, platform="xla")
    call()
    with compilations() as unchanged:
        call()
    try:
        memory_cache.put(before.platform, before.problem.key(), tiles)
        with compilations() as compiled:
            call()
        assert before.config != tiles and chosen().config == tiles
        assert compiled and not unchanged
    finally:
        memory_cache.clear()


def test_slopes_are_an_option_or_an_argument():
    slopes = jnp.array([0.1, 0.4])
    expected = ejx.LightningAttention(slopes=None, scale=0.5)(q, k, v, slopes=slopes)
    same(ejx.lightning_attention(q, k, v, slopes=slopes, scale=0.5), expected)
    gradient = jax.grad(lambda slopes: ejx.lightning_attention(q, k, v, slopes=slopes)[0].sum())(slopes)
    assert jnp.all(gradient != 0)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": (dict(casual=True), TypeError, "flash_attention: expected some of q, k, v.*'casual'"),
    "tune_for": (
        dict(tune_for=(q, k, v)),
        TypeError,
        r"ejx.tune\(flash_attention.*FlashAttention\(tune_for=",
    ),
    "unhashable": (dict(sliding_window=[1, 0]), ValueError, "sliding_window: expected a hashable.* list"),
    "array": (dict(softmax_scale=jnp.ones(())), ValueError, "softmax_scale: expected a hashable"),
    "platform": (dict(platform="tritn"), ValueError, "platform: expected one of 'cuda'.*'tritn'"),
    "option": (dict(dropout_rate=2.0), ValueError, "dropout_rate: expected a probability.*2.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case, unchecked):
    given, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        ejx.flash_attention(q, k, v, **given)


def test_missing_positional_and_traced_arguments():
    attend: Any = functional.flash_attention
    with pytest.raises(TypeError, match=r"flash_attention: expected v, .*write flash_attention\(q, k, v\)"):
        attend(q, k)
    with pytest.raises(
        TypeError, match=r"at most 3 arguments by position \(q, k, v\), received 4; pass others"
    ):
        attend(q, k, v, True)
    with pytest.raises(ValueError, match=r"softmax_scale: expected a Python value.*traced"):
        jax.jit(lambda scale: attend(q, k, v, softmax_scale=scale))(0.1)
