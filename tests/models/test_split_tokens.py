"""Whole models over a mesh that splits rows, tokens and heads, with a part of every matrix on each device: `ejkernel_eqx.models.place`."""

import collections
import contextlib
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx import models
from ejkernel_eqx.attention.ring.arguments import Split
from ejkernel_eqx.nn.token_order import moved
from tests import meshes
from tests.arrays import normal

reorder_sequence = ejx.sequences.reorder_sequence
VOCABULARY, WIDTH, HIDDEN, ROWS, TOKENS = 48, 32, 32, 4, 24
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"num_heads": 4, "num_kv_heads": 2, "rope": ejx.nn.RotaryEmbedding(8), "qk_norm": True},
    "mamba1": {},
    "mamba2": {"head_dim": 8, "state_size": 8},
    "mamba3": {"head_dim": 8, "state_size": 8, "mimo_rank": 2},
    "gated_linear_attention": {"num_heads": 4, "num_kv_heads": 2},
    "lightning_attention": {"num_heads": 4},
    "kimi_delta_attention": {"num_heads": 2, "head_dim": 8},
    "gated_delta_net": {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8},
    "latent_attention": {"num_heads": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    "native_sparse_attention": {"num_heads": 4, "num_kv_heads": 2, "block_size": 8, "num_blocks": 2}
    | {"sliding_window": 8, "compression_size": 8, "compression_stride": 4},
}
EXPERTS, SIX = (models.MoEConfig({"hidden_dim": 32, "num_experts": count, "top_k": 2}) for count in (4, 6))


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """A mesh with explicit axes, of which those that are not named have one device."""
    sizes = dict.fromkeys(models.MESH_AXES, 1) | sizes
    devices = jax.devices()[: math.prod(sizes.values())]
    kinds = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def model_of(mixers: tuple[str, ...], mlp: Any = None, **options: Any) -> models.Decoder:
    mlp = models.MLPConfig(HIDDEN) if mlp is None else mlp
    layers = tuple(models.LayerConfig(name, MIXERS[name], mlp) for name in mixers)
    return models.Decoder(models.DecoderConfig(VOCABULARY, WIDTH, layers), **options, key=jax.random.key(0))


def batch() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TOKENS + 1)).astype(np.int32)


def plain_loss(logits: Any, targets: Any) -> Any:
    of_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_target)


def gradient_of(model: models.Decoder, cross_entropy: Any, **rows: Any) -> tuple[Any, Any]:
    """A compiled function of the arrays and a pair of tokens: the loss and the gradients."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda arrays, x, y: cross_entropy(eqx.combine(arrays, static)(x, **rows), y)
    return jax.jit(jax.value_and_grad(loss)), arrays


def over(
    model: models.Decoder, sizes: dict[str, int], kind: str = "explicit", *, zigzag: bool = False, **rows: Any
) -> Any:
    """The loss and the gradients over a mesh, and the compiled program. With `zigzag`, tokens are in that order."""
    ordered = lambda x: reorder_sequence(x, sizes["sequence"], axis=1) if zigzag else x
    mesh, explicit = mesh_of(sizes), kind.startswith("explicit")
    if not explicit:
        mesh = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * 3)
    there = NamedSharding(mesh, P("data", "sequence"))
    rows = {name: jax.device_put(ordered(x), there) for name, x in rows.items()}
    gradient, arrays = gradient_of(model, models.split_cross_entropy if explicit else plain_loss, **rows)
    # On an automatic mesh the compiler would split tokens' features as it finds the weights split.
    whole = lambda arrays: jax.device_put(arrays, NamedSharding(mesh, P()))
    arrays = models.place(arrays, model, mesh) if explicit else whole(arrays)
    tokens = models.place_tokens(batch(), mesh)
    tokens = [jax.device_put(ordered(jax.device_get(x)), there) for x in tokens]
    with jax.set_mesh(mesh) if kind.endswith("context") else contextlib.nullcontext():
        compiled = gradient.lower(arrays, *tokens).compile()
    found = compiled(arrays, *tokens)
    if explicit:
        for x, gradient in zip(*map(jax.tree.leaves, (arrays, found[1])), strict=True):
            assert meshes.lies(gradient, mesh, x.sharding.spec)
    return found, compiled


def alone(mixers: tuple[str, ...], mlp: Any = None, **rows: Any) -> Any:
    gradient, arrays = gradient_of(model_of(mixers, mlp), plain_loss, **rows)
    return gradient(arrays, batch()[:, :-1], batch()[:, 1:])


def agree(found: Any, expected: Any) -> None:
    (loss, gradients), _ = found
    meshes.agree(loss, expected[0])
    # A bias that softmax takes out again has a gradient of rounding alone.
    rounded = lambda tree: jax.tree.map(lambda x: np.where(abs(x) < 1e-9, 0, x), tree)
    meshes.agree(rounded(gradients), rounded(expected[1]), "gradient")


def shapes_of(compiled: Any, collective: str) -> collections.Counter:
    """The shapes of the results of a collective in the program, and how often."""
    lines = re.findall(rf"= (.*?) {collective}(?:-start)?\(", compiled.as_text() or "")
    return collections.Counter(
        tuple(map(int, sizes.split(","))) for line in lines for sizes in re.findall(r"f32\[([\d,]+)\]", line)
    )


@pytest.mark.slow
def test_only_weights_states_and_latents_are_gathered():
    """Rows, tokens and heads over eight devices."""
    mixers = ("attention", "gated_linear_attention", "latent_attention")
    model = model_of(mixers, sequence_axis="sequence")
    found, compiled = over(model, {"data": 2, "sequence": 2, "tensor": 2})
    agree((found, compiled), alone(mixers))
    matrices = {x.shape[-2:] for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)) if x.ndim > 1}
    half = {(6, 8, 16)}  # of latent attention: the part of the keys or of the values
    half |= {(a // 2, b) for a, b in matrices} | {(a, b // 2) for a, b in matrices}
    gathered = shapes_of(compiled, "all-gather")
    latents = {(ROWS // 2, TOKENS, features) for features in (16, 4)}
    assert latents <= gathered.keys()
    states = {shape for shape in gathered if len(shape) > 3}
    assert set(gathered) - states - latents <= matrices | half, gathered
    # Of every device in the axis a state of its rows, and decays.
    assert states and all(
        shape[:2] == (2, ROWS // 2) and np.prod(shape) <= 2 * 2 * WIDTH * 8 for shape in states
    )
    # Each matrix once forward and at most once more backward.
    assert sum(gathered[shape] for shape in gathered if shape not in states | latents) <= 2 * len(
        [x for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)) if x.ndim > 1]
    )
    assert set(meshes.collectives(compiled)) <= {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}


GLA, DELTA = "gated_linear_attention", "gated_delta_net"
LATENT = "latent_attention"
KDA, LIGHTNING, SPARSE = "kimi_delta_attention", "lightning_attention", "native_sparse_attention"
XLA, OPAQUE, LOOP = {"platform": "xla"}, {"platform": "triton-interpret"}, {"scan_layers": True}
IN_CONTEXT, AUTOMATIC = "explicit in context", "automatic in context"
# Kind of mesh, sizes of its axes, mixers, experts or none, options. A mesh has three axes, some of one device.
NUMBERS: list[tuple[str, dict[str, int], tuple[str, ...], Any, dict[str, Any]]] = [
    (IN_CONTEXT, {"sequence": 2}, ("attention", LIGHTNING), EXPERTS, OPAQUE | LOOP),
    ("explicit", {"data": 2}, ("attention", "mamba2"), None, OPAQUE | LOOP),
    ("explicit", {"tensor": 2}, (DELTA, KDA), None, OPAQUE),
    ("explicit", {"sequence": 2, "tensor": 2}, (LATENT, SPARSE), None, OPAQUE),
    ("explicit", {"data": 2, "sequence": 4}, (LATENT, SPARSE), EXPERTS, XLA),
    ("explicit", {"data": 4}, ("attention",), SIX, XLA),
    ("explicit", {"data": 2, "sequence": 2}, ("mamba1", GLA), None, OPAQUE | {"remat": "kernels"}),
    ("explicit", {"data": 2, "sequence": 2, "tensor": 2}, ("attention",), EXPERTS, OPAQUE),
    (AUTOMATIC, {"data": 2, "sequence": 2}, ("attention", "mamba2"), None, XLA | LOOP),
    (AUTOMATIC, {"data": 2, "sequence": 2}, (LATENT, SPARSE), None, XLA),
]
PACKED = np.sort(np.random.default_rng(1).integers(0, 3, (ROWS, TOKENS)), axis=1).astype(np.int32)


@pytest.mark.parametrize(
    "kind, sizes, mixers, mlp, options",
    [NUMBERS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in NUMBERS[1:])],
    ids=lambda x: "experts" if x is EXPERTS else str(x),
)
def test_numbers_of_one_device(kind, sizes, mixers, mlp, options):
    """Interpreted kernels are as opaque to JAX as those of a GPU. The loop over layers carries the residual, whose type names every axis."""
    if options["platform"] != "xla":
        pytest.importorskip("triton")
    rows: dict[str, Any] = {"segment_ids": PACKED} if len(sizes) == 3 else {}
    model = model_of(mixers, mlp, sequence_axis="sequence", **options)
    agree(over(model, sizes, kind, **rows), alone(mixers, mlp, **rows))


@pytest.mark.parametrize(
    "axis, sizes, mixers",
    [
        ("sequence", {"data": 2, "sequence": 1}, (GLA,)),
        pytest.param(None, {"data": 2, "sequence": 2}, ("mamba1", DELTA, SPARSE), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_segment_ids_that_lie_as_their_tokens(axis, sizes, mixers):
    """Over an axis of one device, and for layers that gather tokens."""
    model = model_of(mixers, platform="xla", sequence_axis=axis)
    agree(over(model, sizes, segment_ids=PACKED), alone(mixers, segment_ids=PACKED))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "platform, mixers",
    [
        ("triton-interpret", ("attention", GLA)),
        ("triton-interpret", ("mamba2", "mamba1", DELTA)),
        ("triton-interpret", ("latent_attention", LIGHTNING, KDA)),
        ("xla", ("attention", "mamba2")),
    ],
    ids=str,
)
def test_decoding_keeps_axes_of_one_device(platform, mixers):
    """The loop over steps carries a token of each row, whose axis of size one the mesh axis of the tokens still names."""
    if platform != "xla":
        pytest.importorskip("triton")
    mesh, model = mesh_of({"data": 2, "sequence": 1, "tensor": 1}), model_of(mixers, platform=platform)
    arrays, static = eqx.partition(model, eqx.is_array)

    def decode(arrays: Any, prompt: Any) -> Any:
        model = eqx.combine(arrays, static)
        logits, cache = model(prompt, model.init_cache(ROWS, 12))
        chosen = lambda logits: jnp.argmax(logits[:, -1:], -1).astype(jnp.int32)

        def step(carry: Any, _: Any) -> Any:
            logits, cache = model(*carry)
            return (chosen(logits), cache), logits

        return jax.lax.scan(step, (chosen(logits), cache), None, 3)[1]

    prompt = batch()[:, :8]
    placed = jax.device_put(prompt, NamedSharding(mesh, P("data", "sequence")))
    meshes.agree(jax.jit(decode)(models.place(arrays, model, mesh), placed), jax.jit(decode)(arrays, prompt))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, mixers, options, packed",
    [
        ("explicit", ("attention",) * 2, {}, False),
        ("explicit", ("mamba2", "attention", LATENT), OPAQUE | LOOP, True),
        (IN_CONTEXT, (DELTA, SPARSE), XLA, False),
        (AUTOMATIC, ("mamba1", "attention", SPARSE), XLA, True),
        (AUTOMATIC, (GLA, LATENT), XLA | LOOP, False),
    ],
    ids=str,
)
def test_tokens_in_zigzag_order(kind, mixers, options, packed):
    """Rows reordered once, where the batch is made; the layers know the positions, and recurrent ones take tokens in temporal order."""
    if options.get("platform") == "triton-interpret":
        pytest.importorskip("triton")
    rows: dict[str, Any] = {"segment_ids": PACKED} if packed else {}
    model = model_of(mixers, sequence_axis="sequence", token_order="zigzag", **options)
    agree(over(model, {"data": 2, "sequence": 4}, kind, zigzag=True, **rows), alone(mixers, **rows))


# One layer by itself: orders of tokens, padding, and calls inside `shard_map`


LAYERS: dict[str, Any] = {
    "attention": ejx.nn.MultiHeadAttention,
    LATENT: ejx.nn.MultiHeadLatentAttention,
    SPARSE: ejx.nn.NativeSparseAttention,
}


def layer_of(name: str = "attention", **options: Any) -> Any:
    return LAYERS[name](WIDTH, **MIXERS[name], **options, key=jax.random.key(1))


BY_LENGTH = ejx.nn.DynamicScaling(2.0, 16)


POSITIONS = [
    ("manual", "zigzag", None, "xla", LATENT),
    ("explicit", "zigzag", BY_LENGTH, "triton-interpret", "attention"),
    ("explicit", "zigzag", None, "triton-interpret", LATENT),
    ("automatic in context", "contiguous", BY_LENGTH, "xla", "attention"),
    ("automatic in context", "zigzag", None, "xla", "attention"),
    ("automatic in context", "zigzag", None, "xla", LATENT),
    ("manual", "zigzag", BY_LENGTH, "xla", "attention"),
    ("manual", "contiguous", None, "triton-interpret", "attention"),
    ("manual", "contiguous", None, "triton-interpret", SPARSE),
    ("manual", "zigzag", None, "xla", SPARSE),
]


@pytest.mark.parametrize(
    "kind, order, scaling, platform, name",
    [POSITIONS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in POSITIONS[1:])],
    ids=str,
)
def test_positions_of_tokens_that_are_split(kind, order, scaling, platform, name):
    """Rows with padding on the left and on the right, whose first real token has position 0."""
    devices, rope = 4, ejx.nn.RotaryEmbedding(4 if name == LATENT else 8, scaling=scaling)
    x = normal(2, (2, TOKENS, WIDTH))
    at = np.arange(TOKENS)
    real = np.stack([at >= 7, at < 33])
    build = lambda **options: eqx.tree_at(
        lambda layer: layer.rope, layer_of(name, **options), rope, is_leaf=lambda x: x is None
    )
    expected = build()(x, padding_mask=real)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(axis_type,), devices=jax.devices()[:devices])
    stored = (lambda x: reorder_sequence(x, devices, axis=1)) if order == "zigzag" else (lambda x: x)
    put = lambda x: jax.device_put(stored(x), NamedSharding(mesh, P(None, "sequence")))
    layer = build(sequence_axis="sequence", token_order=order, platform=platform)
    call = lambda x, real: layer(x, padding_mask=real)
    if kind == "manual":
        tokens = P(None, "sequence")
        call = jax.shard_map(call, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens)
    with jax.set_mesh(mesh) if kind.endswith("context") else contextlib.nullcontext():
        y = jax.jit(call)(put(x), put(real))
    seen = np.asarray(stored(real))[..., None]
    shown, wanted = (np.where(seen, np.asarray(x), 0) for x in (y, stored(expected)))
    meshes.agree(shown, wanted)


@pytest.mark.parametrize("kind", ["explicit", "automatic", "replicated", "manual"])
def test_tokens_are_sent_where_they_are_in_temporal_order(kind):
    split, devices = Split("sequence", "zigzag", None), 4
    axis_type = AxisType.Auto if kind == "automatic" else AxisType.Explicit
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(axis_type,), devices=jax.devices()[:devices])
    x, ids = normal(0, (2, TOKENS, 3)), np.arange(2 * TOKENS, dtype=np.int32).reshape(2, TOKENS)
    tokens = P() if kind == "replicated" else P(None, "sequence")
    stored = [
        jax.device_put(reorder_sequence(a, devices, axis=1), NamedSharding(mesh, tokens)) for a in (x, ids)
    ]

    def call(x: Any, ids: Any) -> Any:
        times = moved(split, x), moved(split, ids, -1)
        return times, (moved(split, times[0], back=True), moved(split, times[1], -1, back=True))

    if kind == "manual":
        specs = ((tokens, tokens),) * 2
        call = jax.shard_map(call, mesh=mesh, in_specs=(tokens, tokens), out_specs=specs)
    with jax.set_mesh(mesh) if kind == "automatic" else contextlib.nullcontext():
        lowered = jax.jit(call).lower(*stored)
        compiled = lowered.compile()
    (in_time, times), back = compiled(*stored)
    assert np.array_equal(in_time, x) and np.array_equal(times, ids)
    assert all(np.array_equal(*pair) for pair in zip(back, stored, strict=True))
    assert set(meshes.collectives(compiled)) == (set() if kind == "replicated" else {"collective-permute"})


@pytest.mark.few(1)
@pytest.mark.parametrize("mixer", ["attention", LATENT])
def test_a_model_of_split_tokens_generates(mixer):
    prompts, options = [[1, 2, 3], [4]], {"max_new_tokens": 3, "stop_tokens": ()}
    model, mesh = model_of((mixer,), platform="xla", sequence_axis="sequence"), mesh_of({"sequence": 2})
    found = models.generate(models.place(model, model, mesh), prompts, **options)
    expected = models.generate(model_of((mixer,), platform="xla"), prompts, **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_more_devices_than_heads_generate_and_train(kind):
    """Opaque calls on a mesh whose shardings the compiler chooses. It splits two heads over half of the axis, which no `PartitionSpec` says."""
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    layer = models.LayerConfig("attention", heads, models.MLPConfig(HIDDEN))
    config, options = models.DecoderConfig(VOCABULARY, WIDTH, (layer,)), {"platform": "xla"}
    build = lambda **axis: models.Decoder(config, **options, **axis, key=jax.random.key(0))
    model, alone = build(sequence_axis="sequence"), build()
    mesh = jax.make_mesh((2, 4), ("sequence", "tensor"), axis_types=(getattr(AxisType, kind),) * 2)
    placed = models.place(model, model, mesh)
    generated = lambda model: (
        models.generate(model, [[1, 2, 3], [4]], max_new_tokens=3, stop_tokens=()).tokens
    )
    np.testing.assert_array_equal(generated(placed), generated(alone))
    gradient, arrays = gradient_of(model, models.split_cross_entropy)
    found = gradient(models.place(arrays, model, mesh), *models.place_tokens(batch(), mesh))
    gradient, arrays = gradient_of(alone, plain_loss)
    agree((found, None), gradient(arrays, batch()[:, :-1], batch()[:, 1:]))


@pytest.mark.slow
def test_a_cache_is_not_split():
    layer, plain = layer_of(sequence_axis="sequence"), layer_of()
    mesh = jax.make_mesh((4,), ("sequence",), devices=jax.devices()[:4])
    x = normal(2, (2, 6, WIDTH))
    placed = jax.device_put(x, NamedSharding(mesh, P()))

    @eqx.filter_jit
    def decode(layer: Any, x: Any) -> Any:
        first, cache = layer(x[:, :5], layer.init_cache(2, 6))
        return jnp.concatenate([first, layer(x[:, 5:], cache)[0]], axis=1)

    meshes.agree(decode(layer, placed), plain(x))
    meshes.agree(decode(layer, x), plain(x))


def test_options_of_split_tokens():
    zigzag: dict[str, Any] = {"sequence_axis": "sequence", "token_order": "zigzag"}
    with pytest.raises(ValueError, match="token_order: expected 'contiguous' without sequence_axis"):
        layer_of(token_order="zigzag")
    with pytest.raises(ValueError, match="mask: expected None with sequence_axis='sequence', received Mask"):
        layer_of(LATENT, sequence_axis="sequence")(jnp.zeros((8, WIDTH)), mask=ejx.Mask.causal())
    layer, mesh = layer_of(**zigzag), jax.make_mesh((4,), ("sequence",), devices=jax.devices()[:4])
    for name in ("attention", LATENT):
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match="cu_seqlens: expected None in a call with one"),
        ):
            layer_of(name, **zigzag)(jnp.zeros((8, WIDTH)), cu_seqlens=jnp.array([0, 8]))
    with pytest.raises(ValueError, match="positions: expected those of tokens in zigzag order"):
        eqx.filter_jit(layer)(jnp.zeros((1, 8, WIDTH)))


@pytest.mark.slow
def test_memory_of_a_device_falls_with_their_number(optimised):
    """Twice the tokens on twice the devices take about as much of each."""

    def temporary(devices: int, tokens: int) -> int:
        model = model_of(("attention",), sequence_axis="sequence", remat="kernels")
        mesh = mesh_of({"sequence": devices})
        gradient, arrays = gradient_of(model, models.split_cross_entropy)
        where = NamedSharding(mesh, P("data", "sequence"))
        x = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=where)
        lowered = gradient.lower(models.place(arrays, model, mesh), x, x)
        return optimised(lowered).memory_analysis().temp_size_in_bytes

    one, two = temporary(4, 32768), temporary(8, 65536)
    assert two <= 1.1 * one, (one, two)
