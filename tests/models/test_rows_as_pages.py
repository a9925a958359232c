"""Decoding of rows by the kernels of pages: the logits and caches of layers that run one after the other over rows."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig
from ejkernel_eqx.models.caches import after_prompts, before_prompts
from ejkernel_eqx.models.rows_as_pages import have_pages

INTERPRET = "triton-interpret"
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
ROPE = {"rope": ejx.nn.RotaryEmbedding(16)}
FULL = LayerConfig("attention", HEADS | ROPE | {"qk_norm": True}, MLPConfig(24))
LOCAL = dataclasses.replace(FULL, options=HEADS | ROPE | {"sliding_window": 5, "sinks": True})
DELTA = LayerConfig("gated_delta_net", {"num_k_heads": 1, "num_v_heads": 2, "head_dim": 16}, MLPConfig(24))
EXPERTS = MoEConfig({"hidden_dim": 8, "num_experts": 4, "top_k": 2})
LATENT_SIZES = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT = LayerConfig("latent_attention", {"num_heads": 2, "v_head_dim": 16, **LATENT_SIZES}, EXPERTS)
GIVING = dataclasses.replace(FULL, gives_keys=True)
SHARED = LayerConfig("cross_layer_attention", HEADS | ROPE | {"qk_norm": True}, MLPConfig(24), keys_of=1)
MAMBA = LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})
MAMBA3 = LayerConfig("mamba3", {"head_dim": 8, "state_size": 8})
CONFIGS = {
    "attention": DecoderConfig(40, 32, (FULL,) * 2),
    "window": DecoderConfig(40, 32, (LOCAL, FULL)),
    "hybrid": DecoderConfig(40, 32, (FULL, DELTA, FULL, DELTA, FULL)),
    "shared keys": DecoderConfig(40, 32, (FULL, GIVING, SHARED, SHARED)),
    "latent": DecoderConfig(40, 32, (LATENT,) * 2),
    "short": DecoderConfig(40, 32, (FULL, DELTA)),
    "states": DecoderConfig(40, 32, (MAMBA, MAMBA3)),
    "gates": DecoderConfig(40, 32, (LayerConfig("attention", HEADS | {"forget_gate": True}),)),
}
DECODED = [name for name in CONFIGS if name not in ("short", "gates")]  # "hybrid" has the layers of the first
ROWS = 3
PROMPTS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (ROWS, 4)))
REAL = np.array([[True] * 4, [False, False, True, True], [False, True, True, True]])
STEPS = jnp.asarray(np.random.default_rng(1).integers(0, 40, (3, ROWS, 1)))
GOES_ON = np.array([[True, True, True], [True, True, False], [True, True, False]])[..., None]


@functools.cache
def model_of(name: str, platform: str) -> Decoder:
    return Decoder(CONFIGS[name], platform=platform, key=jax.random.key(3))


def close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(np.max(np.abs(b)))))


def decoded(model: Decoder, prompts: Any, steps: Any, length: int = 48) -> Any:
    """The logits of each step in a loop, and the caches after the prompt and the last one, which are made in the program itself."""
    _, begun = model(prompts, model.init_cache(ROWS, length), padding_mask=jnp.asarray(REAL))

    def step(cache: Any, now: Any) -> tuple[Any, Any]:
        tokens, real = now
        logits, cache = model(tokens, cache, padding_mask=real)
        return cache, jnp.where(real[..., None], logits, 0)

    cache, logits = jax.lax.scan(step, begun, (steps, jnp.asarray(GOES_ON)))
    return logits, begun, cache


@functools.cache
def run(name: str, platform: str, length: int = 48) -> Any:
    return eqx.filter_jit(decoded)(model_of(name, platform), PROMPTS, STEPS, length)


def is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            value = getattr(value, "jaxpr", value)
            yield from equations(value) if hasattr(value, "eqns") else ()


def arrays_of_rows(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree) if x.ndim > 2]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DECODED)
def test_steps_in_a_loop_are_those_over_rows(name):
    """Prompts of different lengths, then rows of which one is done early."""
    (logits, begun, cache), (expected, _, whole) = run(name, INTERPRET), run(name, "xla")
    close(logits, expected)
    close(cache, whole)
    # A row that is done keeps what it had, bit for bit; others do not.
    for before, after in zip(arrays_of_rows(begun), arrays_of_rows(cache), strict=True):
        assert not np.array_equal(before[:, 0], after[:, 0])
    last = eqx.filter_jit(lambda model, cache: model(STEPS[0], cache, padding_mask=GOES_ON[1])[1])
    for before, after in zip(
        *map(arrays_of_rows, (cache, last(model_of(name, INTERPRET), cache))), strict=True
    ):
        assert np.array_equal(before[:, 2], after[:, 2]) and not np.array_equal(before[:, 1], after[:, 1])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("length", [48, 37])
def test_several_tokens_a_row(name, length):
    """With padding anywhere, and without; a row of 37 tokens is one page."""
    real = jnp.asarray([[False, True, True, False], [False] * 4, [True] * 4])

    def call(model: Decoder) -> Any:
        _, cache = model(PROMPTS, model.init_cache(ROWS, length), padding_mask=jnp.asarray(REAL))
        first, cache = model(PROMPTS, cache, padding_mask=real)
        second, cache = model(PROMPTS, cache)
        return jnp.where(real[..., None], first, 0), second, cache

    close(*(eqx.filter_jit(call)(model_of(name, platform)) for platform in (INTERPRET, "xla")))


@pytest.mark.few(1)
@pytest.mark.parametrize("lead", [(), (2, 1)])
def test_any_leading_axes(lead):
    def call(model: Decoder) -> Any:
        tokens = jnp.broadcast_to(STEPS[0, :1, 0], (*lead, 1))
        return model(tokens, model(tokens, model.init_cache(lead, 32))[1])

    close(*(eqx.filter_jit(call)(model_of("short", platform)) for platform in (INTERPRET, "xla")))


def test_examples_of_vmap_have_caches_of_their_own():
    def call(model: Decoder) -> Any:
        cache = jax.vmap(lambda _: model.init_cache((), 32))(jnp.arange(ROWS))
        return eqx.filter_vmap(lambda *given: model(*given))(STEPS[0], cache)

    close(*(eqx.filter_jit(call)(model_of("short", platform)) for platform in (INTERPRET, "xla")))


@pytest.mark.slow
def test_the_gradient_is_that_over_rows():
    def loss(model: Decoder) -> Any:
        logits, cache = model(STEPS[0], model.init_cache(ROWS, 32))
        return jnp.sum(jnp.sin(logits)) + jnp.sum(cache.stacks[0][0].k)

    close(*(eqx.filter_grad(loss)(model_of("attention", platform)) for platform in (INTERPRET, "xla")))


def test_caches_are_carried_and_the_host_is_not_asked():
    """In the program of a step a loop over layers carries the caches, and nothing asks the host."""
    for name in ("hybrid", "latent"):
        model = model_of(name, INTERPRET)
        cache = model.init_cache(ROWS, 48)
        call = lambda model, cache: model(STEPS[0], cache, padding_mask=GOES_ON[1])
        program = eqx.filter_make_jaxpr(call)(model, cache)[0]
        names = {eqn.primitive.name for eqn in equations(program.jaxpr)}
        assert not {name for name in names if "callback" in name or name == "cond"}
        loops = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"]
        assert loops
        for loop in loops:
            body = next(x for x in jax.tree.leaves(loop.params, is_leaf=is_program) if is_program(x))
            body = getattr(body, "jaxpr", body)
            pairs = [
                *zip(loop.invars, body.invars, strict=True),
                *zip(loop.outvars, body.outvars, strict=True),
            ]
            scanned = [whole.aval for whole, one in pairs if whole.aval.shape != one.aval.shape]
            assert scanned
            # Weights and tables of pages are scanned over; nothing of a cache's size is.
            floats = [x.shape for x in scanned if jnp.issubdtype(x.dtype, jnp.floating)]
            rows = [shape for shape in floats if {ROWS, 48, ROWS * 3} & {*shape}]
            assert not rows


def test_donated_caches_are_written_in_place(optimised):
    model = model_of("attention", INTERPRET)
    arrays, static = eqx.partition(model, eqx.is_array)
    call = lambda cache, arrays: eqx.combine(arrays, static)(STEPS[0], cache)
    cache = model.init_cache(ROWS, 256)
    memory = optimised(jax.jit(call, donate_argnums=0).lower(cache, arrays)).memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= cache.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["window", "hybrid", "latent"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_full_row_is_closed_and_others_are_exact(name, tokens):
    model, length = model_of(name, INTERPRET), 16
    call = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache))

    def filled(lengths: Any) -> Any:
        """Caches with rows of these lengths."""
        cache = model.init_cache(ROWS, length)
        real = np.arange(length)[None] < np.asarray(lengths)[:, None]
        prompts = jnp.asarray(np.random.default_rng(2).integers(0, 40, (ROWS, length)))
        for at in range(0, length, 8):
            part = slice(at, at + 8)
            _, cache = eqx.filter_jit(model)(prompts[:, part], cache, padding_mask=jnp.asarray(real[:, part]))
        return cache

    cache, other = filled([5, length, length - tokens]), filled([5, length - tokens, length - tokens])
    new = jnp.asarray(np.random.default_rng(3).integers(0, 40, (ROWS, tokens)))
    with pytest.raises(ValueError, match="KVCache is full: max_length=16"):
        model(new, cache)
    logits, after = call(model, new, cache)
    expected, _ = call(model, new, other)
    assert np.all(np.isnan(logits[1])) and np.array_equal(logits[::2], expected[::2])
    assert after.overflowed.tolist() == [False, True, False] and not np.any(cache.overflowed)
    bounded = [one for stack in after.stacks for one in stack if hasattr(one, "overflowed")]
    assert all(one.lengths.tolist() == [[5 + tokens, length, length]] * len(one.lengths) for one in bounded)
    for before, now in zip(arrays_of_rows(cache), arrays_of_rows(after), strict=True):
        assert np.array_equal(before[:, 1], now[:, 1]) and not np.array_equal(before[:, 0], now[:, 0])
    # The flag stays, whatever comes.
    _, later = eqx.filter_jit(model)(
        new, after, padding_mask=jnp.asarray([[True] * tokens, *[[False] * tokens] * 2])
    )
    assert later.overflowed.tolist() == [False, True, False]


def test_checks_that_are_asked_for_stop_the_program():
    model = model_of("attention", INTERPRET)
    cache = jax.tree.map(
        lambda x: jnp.full_like(x, 16) if x.dtype == jnp.int32 else x, model.init_cache(ROWS, 16)
    )
    with ejx.check_values():
        call = jax.jit(lambda cache: model(STEPS[0], cache))
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="KVCache is full: max_length=16"):
            jax.block_until_ready(call(cache))


def test_what_has_no_pages_runs_over_rows():
    """The window alone, keys of 8 bits, gates, of which rows have no sums, and rows of many tokens."""
    model = model_of("window", INTERPRET)
    cases = {
        "rolling": ({"rolling": True}, 1),
        "bytes": ({"dtype": jnp.float8_e4m3fn}, 1),
        "many tokens": ({}, 9),
    }
    for options, tokens in cases.values():
        cache, x = model.init_cache(ROWS, 16, **options), jnp.zeros((ROWS, tokens, 32))
        assert not have_pages(model, x, cache, {})
    assert have_pages(model, jnp.zeros((ROWS, 1, 32)), model.init_cache(ROWS, 16), {})
    gated = model_of("gates", INTERPRET)
    assert not have_pages(gated, jnp.zeros((ROWS, 1, 32)), gated.init_cache(ROWS, 16), {})
    # Arrays on several devices, also where the compiler splits them.
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,))
    spread = jax.device_put(
        jnp.zeros((2, 1, 32)), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    )
    paged = lambda x: jnp.asarray(have_pages(model, x, model.init_cache(2, 16), {}))
    assert not jax.jit(paged)(spread) and jax.jit(paged)(jnp.zeros((2, 1, 32)))
    plain = model_of("window", "xla")
    assert not have_pages(plain, jnp.zeros((ROWS, 1, 32)), plain.init_cache(ROWS, 16), {})


def test_states_have_no_capacity():
    for name, lead, shape in (("states", (2, 3), ()), ("hybrid", (2, 3), (2, 3)), ("hybrid", (), ())):
        overflowed = model_of(name, "xla").init_cache(lead, 16).overflowed
        assert overflowed.shape == shape and not np.any(overflowed)


@pytest.mark.parametrize("name", CONFIGS)
def test_first_tokens_without_the_cache(name):
    """Features of real tokens, and the caches that a call over rows leaves, up to what is behind the tokens of a row. Padding is NaN."""
    model, count = model_of(name, "xla"), np.array([4, 2, 3], np.int32)
    model = eqx.tree_at(lambda model: model.embedding, model, model.embedding.at[39].set(jnp.nan))
    real = jnp.asarray(np.arange(4) < count[:, None])
    prompts = jnp.where(real, jnp.minimum(PROMPTS, 38), 39)
    empty = model.init_cache(ROWS, 48)
    first = before_prompts(model, empty)
    if name in ("latent", "shared keys"):
        assert first is empty
        return
    found, cache = model.features(prompts, first, padding_mask=real)
    expected, wanted = model.features(prompts, empty, padding_mask=real)
    close(jnp.where(real[..., None], found, 0), jnp.where(real[..., None], expected, 0))
    of_tokens = np.arange(48) < count[:, None]

    def seen(cache: Any) -> Any:
        hide = lambda x: jnp.where(of_tokens[None, :, :, None, None], x, 0)
        kept = lambda one: (
            dataclasses.replace(one, k=hide(one.k), v=hide(one.v)) if hasattr(one, "k") else one
        )
        return [[kept(one) for one in stack] for stack in cache.stacks]

    close(seen(after_prompts(cache, jnp.asarray(count))), seen(wanted))


def test_first_tokens_of_rotations_by_length_keep_the_cache():
    """Their rows have their own lengths, without padding."""
    scaling = ejx.nn.DynamicScaling(2.0, 8)
    layer = dataclasses.replace(FULL, options=HEADS | {"rope": ejx.nn.RotaryEmbedding(16, scaling=scaling)})
    model = Decoder(DecoderConfig(40, 32, (layer,)), key=jax.random.key(0))
    empty = model.init_cache(ROWS, 16)
    assert before_prompts(model, empty) is empty
