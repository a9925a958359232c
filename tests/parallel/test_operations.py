"""Every operation on every kind of mesh: its numbers, where its results lie, and that no operand moves."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests import meshes
from tests.attention import dense
from tests.meshes import HEADS, ROWS

QKV = (ROWS, None, HEADS, None)
IDS = jnp.array([0, 0, -1, 1, 1, 1])


@dataclasses.dataclass(frozen=True)
class Case:
    """A call `build(platform)(**arrays)`, and how its arrays lie: the axes of each that rows and heads are split along, of those left out none."""

    build: Callable[[ejx.PlatformLike], Callable[..., Any]]
    arrays: dict[str, np.ndarray]
    split: Mapping[str, tuple[str | None, ...]]
    results: tuple[tuple[str | None, ...], ...]
    forward_only: bool = False

    @property
    def learned(self) -> list[str]:
        """What gradients are taken of."""
        floats = [name for name, x in self.arrays.items() if x.dtype == jnp.float32]
        return [] if self.forward_only else floats

    def specs(self, layout: str) -> dict[str, P]:
        return {name: meshes.spec(layout, *self.split.get(name, ())) for name in self.arrays}


def called(build: Callable[..., Any], **options: Any) -> Callable[[ejx.PlatformLike], Callable[..., Any]]:
    return lambda platform: lambda **arrays: build(platform=platform)(**arrays, **options)


def stepped(build: Callable[..., Any]) -> Callable[[ejx.PlatformLike], Callable[..., Any]]:
    return lambda platform: build(platform=platform).step


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.asarray(dense.normal(seed, *shape))


def qkv(heads: int = 4, kv_heads: int = 2, t: int = 6) -> dict[str, np.ndarray]:
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {name: normal(i, 4, t, n, 8) for i, (name, n) in enumerate(shapes.items())}


def decays(*shape: int) -> np.ndarray:
    return -np.abs(normal(7, *shape))


_FULL: dict[str, Any] = {"q": QKV, "k": QKV, "v": QKV}
_STEP: dict[str, Any] = {name: (ROWS, HEADS, None) for name in "qkv"}
_STATE = (ROWS, HEADS, None, None)
_GATE = (ROWS, None, HEADS)
_NEAR = ejx.Mask.from_function(lambda h, q, k: abs(q - k) <= h)
_ABSORBED = partial(ejx.AbsorbedLatentAttention, softmax_scale=0.3)

CASES = {
    "flash": Case(
        called(partial(ejx.FlashAttention, causal=True), return_lse=True),
        qkv() | {"bias": normal(3, 1, 4, 6, 6), "sinks": normal(4, 4)},
        _FULL | {"bias": (None, HEADS)},
        (QKV, _GATE),
    ),
    "flash of few key heads": Case(
        called(partial(ejx.FlashAttention, causal=True), return_lse=True, segment_ids=jnp.maximum(IDS, 0)),
        qkv(8, 1),
        _FULL | {"k": (ROWS,), "v": (ROWS,)},
        (QKV, _GATE),
    ),
    "block sparse": Case(
        called(partial(ejx.BlockSparseAttention, _NEAR, block_size=2), return_lse=True),
        qkv() | {"block_map": normal(3, 4, 4, 3, 3) < 1},
        _FULL | {"block_map": (ROWS, HEADS)},
        (QKV, _GATE),
    ),
    "latent": Case(
        called(partial(ejx.MultiHeadLatentAttention, causal=True), return_lse=True),
        qkv(4, 4) | {"q": normal(0, 4, 6, 4, 12), "k_rope": normal(3, 4, 6, 4), "sinks": normal(4, 4)},
        _FULL | {"k_rope": (ROWS,)},
        (QKV, _GATE),
    ),
    "absorbed latent": Case(
        called(_ABSORBED, return_lse=True, kv_lengths=jnp.array([6, 2, 0, 5])),
        {"q": normal(0, 4, 2, 4, 12), "latent": normal(1, 4, 6, 5), "k_rope": normal(2, 4, 6, 4)}
        | {"w_uk": normal(3, 4, 8, 5), "w_uv": normal(4, 4, 8, 5)},
        {"q": QKV, "latent": (ROWS,), "k_rope": (ROWS,), "w_uk": (HEADS,), "w_uv": (HEADS,)},
        (QKV, _GATE),
        forward_only=True,
    ),
    "native sparse": Case(
        called(partial(ejx.NativeSparseAttention, 2, 2, 3)),
        qkv(8, 4) | {"gates": np.abs(normal(5, 4, 6, 8, 3))},
        _FULL | {"gates": _GATE},
        (QKV,),
    ),
    "linear": Case(
        called(ejx.LinearAttention, segment_ids=IDS),
        qkv() | {"g": decays(4, 6, 4), "initial_state": normal(5, 4, 4, 8, 8)},
        _FULL | {"g": _GATE, "initial_state": _STATE},
        (QKV, _STATE),
    ),
    "gated delta": Case(
        called(ejx.GatedDeltaRule),
        qkv(2, 2)
        | {"v": normal(2, 4, 6, 4, 8), "g": decays(4, 6, 4), "beta": np.abs(normal(6, 4, 6, 4)) / 4},
        _FULL | {"g": _GATE, "beta": _GATE},
        (QKV, _STATE),
    ),
    "state space of one group": Case(
        called(ejx.StateSpaceV2),
        {"x": normal(0, 4, 6, 4, 8), "dt": np.abs(normal(1, 4, 6, 4)), "A": decays(4)}
        | {"B": normal(2, 4, 6, 1, 8), "C": normal(3, 4, 6, 1, 8)},
        {"x": QKV, "dt": _GATE, "B": (ROWS,), "C": (ROWS,)},
        (QKV, _STATE),
    ),
    "scan": Case(
        called(ejx.StateSpaceV1, segment_ids=IDS),
        {"x": normal(0, 4, 6, 8), "dt": np.abs(normal(1, 4, 6, 8)), "A": decays(8, 4)}
        | {"B": normal(2, 4, 6, 4), "C": normal(3, 4, 6, 4)},
        {"x": _GATE, "dt": _GATE, "A": (HEADS,), "B": (ROWS,), "C": (ROWS,)},
        (_GATE, (ROWS, HEADS)),
    ),
    "convolution": Case(
        called(ejx.CausalConv1d),
        {"x": normal(0, 4, 6, 8), "weight": normal(1, 8, 3), "bias": normal(2, 8)},
        {"x": _GATE, "weight": (HEADS,), "bias": (HEADS,)},
        (_GATE, _GATE),
    ),
    "lstm": Case(
        lambda platform: (
            lambda hidden, cell, **arrays: ejx.Recurrent(platform=platform)(
                **arrays, initial_state=(hidden, cell), segment_ids=IDS
            )
        ),
        {"inputs": normal(0, 4, 6, 5), "weight_hh": normal(1, 32, 8) / 4, "bias_hh": normal(2, 32)}
        | {"weight_ih": normal(3, 32, 5) / 4, "hidden": normal(4, 4, 8), "cell": normal(5, 4, 8)},
        {"inputs": (ROWS,), "hidden": (ROWS,), "cell": (ROWS,)},
        ((ROWS,), (ROWS,), (ROWS,)),
    ),
    "gru": Case(
        called(partial(ejx.Recurrent, "gru", reverse=True)),
        {"inputs": normal(0, 4, 6, 24), "weight_hh": normal(1, 24, 8) / 4, "bias_hh": normal(2, 24)},
        {"inputs": (ROWS,)},
        ((ROWS,), (ROWS,)),
    ),
    "norm": Case(
        called(partial(ejx.GatedRMSNorm, group_size=4)),
        {"x": normal(0, 4, 6, 8), "z": normal(1, 4, 6, 8), "weight": normal(2, 8)},
        {"x": (ROWS,), "z": (ROWS,)},
        ((ROWS,),),
    ),
    "norm of a sum": Case(
        called(ejx.ResidualRMSNorm),
        {"x": normal(0, 4, 6, 8), "branch": normal(1, 4, 6, 8), "weight": normal(2, 8)},
        {"x": (ROWS,), "branch": (ROWS,)},
        ((ROWS,), (ROWS,)),
    ),
    "rows by weights": Case(
        lambda platform: (
            lambda x, gate, up, norm, residual: ejx.Matmul("silu", gated=True, platform=platform)(
                x, gate, up, norm=norm, residual=residual
            )
        ),
        {
            "x": normal(0, 4, 6, 8),
            "gate": normal(1, 4, 8) / 3,
            "up": normal(2, 4, 8) / 3,
            "norm": normal(3, 8),
            "residual": normal(4, 4, 6, 4),
        },
        {"x": (ROWS,), "gate": (HEADS,), "up": (HEADS,), "residual": _GATE},
        (_GATE,),
    ),
    "rotary heads": Case(
        called(ejx.RotaryHeads, norm_eps=1e-5),
        {
            **{name: x for name, x in qkv().items() if name != "v"},
            "cos": normal(3, 4, 6, 3),
            "sin": normal(4, 4, 6, 3),
        }
        | {"q_norm": normal(5, 8), "k_norm": normal(6, 8)},
        {"q": QKV, "k": QKV, "cos": (ROWS,), "sin": (ROWS,)},
        (QKV, QKV),
    ),
    "pooling": Case(
        called(partial(ejx.MeanPooling, "max", chunk_size=4), mask=IDS >= 0),
        {"x": normal(0, 4, 6, 8)},
        {"x": _GATE},
        (_GATE,),
    ),
    "pooling, normalised": Case(
        called(partial(ejx.MeanPooling, num_segments=2, normalize=True), segment_ids=IDS),
        {"x": normal(0, 4, 6, 8)},
        {"x": (ROWS,)},
        ((ROWS,),),
    ),
    "step of a linear recurrence": Case(
        stepped(ejx.LinearAttention),
        {name: x[:, 0] for name, x in qkv().items()} | {"state": normal(5, 4, 4, 8, 8), "g": decays(4, 4)},
        _STEP | {"state": _STATE, "g": (ROWS, HEADS)},
        ((ROWS, HEADS), _STATE),
        forward_only=True,
    ),
    "step of a scan": Case(
        stepped(ejx.StateSpaceV1),
        {"x": normal(0, 4, 8), "dt": np.abs(normal(1, 4, 8)), "A": decays(8, 4)}
        | {"B": normal(2, 4, 4), "C": normal(3, 4, 4), "state": normal(4, 4, 8, 4)},
        {"x": (ROWS, HEADS), "dt": (ROWS, HEADS), "A": (HEADS,), "B": (ROWS,), "C": (ROWS,)}
        | {"state": (ROWS, HEADS)},
        ((ROWS, HEADS), (ROWS, HEADS)),
        forward_only=True,
    ),
}


def leaves(results: Any) -> tuple[jax.Array, ...]:
    return tuple(jax.tree.leaves(results))


@cache
def everything(name: str, platform: ejx.PlatformLike) -> Any:
    """A compiled function: the results and, of a sum of them, the gradients."""
    case, call = CASES[name], CASES[name].build(platform)

    def results_and_gradients(arrays: Any) -> Any:
        learned = {name: arrays[name] for name in case.learned}
        results, pull = jax.vjp(lambda learned: leaves(call(**{**arrays, **learned})), learned)
        return results, pull(tuple(jnp.cos(x) for x in results)) if learned else ()

    return jax.jit(results_and_gradients)


@cache
def on_one_device(name: str, platform: ejx.PlatformLike) -> Any:
    return everything(name, platform)(CASES[name].arrays)


_EXPLICIT, OPAQUE = "explicit without context", "triton-interpret"
# Each operation on both kinds of mesh; a member of each family on every kind and layout.
EVERY = [(OPAQUE, _EXPLICIT, "both"), ("xla", _EXPLICIT, "both"), ("xla", "automatic", "both")]
MORE = [("xla", "explicit", "data"), (OPAQUE, "explicit", "tensor"), (OPAQUE, "automatic", "both")]
ON_MESHES = [(name, *rest) for name in CASES for rest in EVERY]
ON_MESHES += [(name, *rest) for name in ("flash", "linear", "norm") for rest in MORE]


@pytest.mark.few(5)
@pytest.mark.parametrize("name, platform, kind, layout", ON_MESHES)
def test_on_a_mesh(name, platform, kind, layout):
    if platform != "xla":
        pytest.importorskip("triton")
    case = CASES[name]
    call, expected = case.build(platform), on_one_device(name, platform)
    mesh = meshes.mesh_of(kind)
    specs = case.specs(layout)
    arrays = meshes.place(mesh, case.arrays, specs)
    with meshes.context(kind, mesh):
        results, gradients = everything(name, platform)(arrays)
    meshes.agree(results, expected[0])
    meshes.agree(gradients, expected[1], "gradient")
    if kind == "automatic" and (platform != "xla" or name == "absorbed latent"):
        return  # a callback stays whole where the compiler splits; and the loop over pages ends at the longest of all rows
    with meshes.context(kind, mesh):
        forward = jax.jit(lambda arrays: leaves(call(**arrays))).lower(arrays).compile()
    assert not meshes.collectives(forward)
    for x, axes in zip(results, case.results, strict=True):
        assert meshes.lies(x, mesh, meshes.spec(layout, *axes)), (x.sharding, axes)
    for name in case.learned:
        if "automatic" not in kind:
            assert meshes.lies(gradients[0][name], mesh, specs[name]), (name, gradients[0][name].sharding)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "name, size", [*((name, 1) for name in CASES), ("flash", 2), ("linear", 2), ("norm", 2)]
)
def test_opaque_results_have_the_types_of_xlas(name, size):
    """A carry of `lax.scan` keeps its type, whichever platform computes it: mesh axes stay that a kernel does not split, of one device too."""
    pytest.importorskip("triton")
    case, axes = CASES[name], (ROWS, HEADS, "tokens", "channels")
    mesh = jax.make_mesh((2, 2, size, 1), axes, axis_types=(AxisType.Explicit,) * 4)

    def spec_of(x: Any, known: tuple[str | None, ...]) -> P:
        """With rows, also tokens and channels are split, and heads where they are."""
        if not known or known[0] != ROWS:
            return P(*known)
        free, given = iter(axes[2:]), (*known, *(None,) * (x.ndim - len(known)))
        return P(*(next(free, None) if a is None and n % size == 0 else a for a, n in zip(given, x.shape)))

    specs = {name: spec_of(x, case.split.get(name, ())) for name, x in case.arrays.items()}
    arrays = meshes.place(mesh, case.arrays, specs)

    types = lambda platform: [str(x) for x in everything(name, platform).trace(arrays).jaxpr.out_avals]
    expected = types("xla")
    assert types("triton-interpret") == expected
    # A step has no tokens, and latents are read by rows that have both.
    assert any("tokens" in x for x in expected) or "step" in name or name == "absorbed latent"


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", OPAQUE])
def test_mapped_rows_stay_where_they_are(platform):
    """Layers of Equinox are mapped over the batch: `vmap` of what is split, and gradients for each example."""
    if platform != "xla":
        pytest.importorskip("triton")
    attn: Any = ejx.FlashAttention(causal=True, platform=platform)
    gradients = jax.vmap(jax.grad(lambda *given: jnp.sum(jnp.sin(attn(*given))), (0, 1, 2)))
    arrays, mesh, where = tuple(qkv().values()), meshes.mesh_of("explicit"), P(ROWS, None, HEADS)
    placed = meshes.place(mesh, arrays, (where,) * 3)
    for function in (jax.vmap(attn), gradients):
        compiled = jax.jit(function).lower(*placed).compile()
        assert not meshes.collectives(compiled)
        results = compiled(*placed)
        meshes.agree(results, jax.jit(function)(*arrays), "gradient")
        assert all(meshes.lies(x, mesh, where) for x in jax.tree.leaves(results))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit without context", "automatic"])
def test_attention_over_pages(kind):
    """Pages are split by key heads, queries by heads; new tokens are written where their head is."""
    cache = ejx.PagedKVCache.init(4, page_size=4, num_kv_heads=2, head_dim=8)
    cache = cache.bind(jnp.array([[0, 1], [2, 3]]), jnp.array([5, 7]))
    arrays = {"q": normal(0, 2, 4, 8), "k": normal(1, 12, 2, 8), "v": normal(2, 12, 2, 8)}
    slots = jnp.array([0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14])

    def call(cache, arrays):
        cache = cache.append(arrays["k"], arrays["v"], slots)
        return ejx.PagedAttention()(arrays["q"], cache), cache.k

    expected = jax.jit(call)(cache, arrays)
    mesh = meshes.mesh_of(kind)
    split = P(None, None, HEADS)
    placed = meshes.place(mesh, (cache.k, cache.v), (split, split))
    on_mesh = dataclasses.replace(cache, k=placed[0], v=placed[1])
    arrays = meshes.place(mesh, arrays, {name: P(None, HEADS) for name in arrays})
    with meshes.context(kind, mesh):
        out, pages = jax.jit(call)(on_mesh, arrays)
    meshes.agree((out, pages), expected)
    assert meshes.lies(out, mesh, P(None, HEADS)) and meshes.lies(pages, mesh, split)
