"""Forgetting attention: `log_forget` on every platform that has it, against the float64 formula; its sums on long rows; its errors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import log_forget
from tests.attention.cases import Case, make, poison
from tests.attention.dense import check, lse_of, normal, qkv, quick
from tests.attention.inner import AttentionArrays, AttentionSpec, example_problem, visibility
from tests.attention.kernels import assert_same, check_kernels, cotangents, run_reference
from tests.attention.test_compose import assert_maps
from tests.attention.test_sharding import compared, mesh_of, MESHES, on
from tests.tolerances import assert_close


def gates(*shape: int, seed: int = 7) -> jax.Array:
    return jax.nn.log_sigmoid(normal(seed, *shape) + 1)


@dataclasses.dataclass(frozen=True)
class Gated(Case):
    """With gates of every batch row, or of one that all share."""

    gates: str = "BSH"
    strength: float = 1.0

    @property
    def log_forget(self) -> jax.Array:
        return self.strength * gates(*self.shape(self.gates))


def gated(case: Any, make: Any = make) -> tuple[AttentionArrays, AttentionSpec]:
    arrays, spec = make(case)
    return log_forget.of_tokens(arrays._replace(log_forget=case.log_forget), spec), spec


def poisoned(case: Any, arrays: AttentionArrays) -> AttentionArrays:
    """The gates of padding are NaN before `of_tokens`."""
    hidden = ~visibility(arrays._replace(mask=None), case.spec).any((1, 2))[:, :, None]
    arrays = poison(case, arrays._replace(log_forget=None))
    hidden = hidden if case.gates[0] == "B" else hidden.all(0, keepdims=True)
    nan = jnp.where(hidden, jnp.nan, case.log_forget)
    return log_forget.of_tokens(arrays._replace(log_forget=nan), case.spec)


SMALL = Gated(B=2, T=45, S=45, H=4, K=2, D=16, V=24, right=0)
CASES = {
    "grouped": SMALL,
    "cached": dataclasses.replace(SMALL, T=21, S=50, offset=29, soft_cap=3.0, sinks="1H", gates="1SH"),
    "window": dataclasses.replace(SMALL, left=9, bias="1HTS", H=2, K=1, dtype="bfloat16"),
    "segments": dataclasses.replace(SMALL, segments=True, dropout=0.3),
    "packed": dataclasses.replace(SMALL, right=None, rows="packed", sinks="1H"),
    "lengths": dataclasses.replace(SMALL, B=3, T=33, right=None, rows="lengths"),
    "mask": dataclasses.replace(SMALL, mask="B1TS", alibi=None, dtype="float16"),
    "one query": dataclasses.replace(SMALL, T=1, offset=44),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_xla(name, monkeypatch):
    from tests.attention.test_xla import run, TILES

    check_gated(CASES[name], lambda *args: run(*args, TILES[1]), monkeypatch)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_triton(name, monkeypatch):
    pytest.importorskip("triton")
    from tests.attention.test_triton_interpret import run, TILES

    tiles: Any = TILES[1 + len(name) % 3]
    check_gated(CASES[name], lambda a, out, lse, spec: run(a, out, lse, spec, tiles), monkeypatch)


def check_gated(case: Any, run: Any, monkeypatch: Any) -> None:
    """Output, log-sum-exp and all gradients; the same from poisoned arrays, bit for bit."""
    from tests.attention import kernels

    monkeypatch.setattr(kernels, "make", gated)
    monkeypatch.setattr(kernels, "poison", poisoned)
    check_kernels(case, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reference(name):
    """The package's own formula, in float64."""
    case = dataclasses.replace(CASES[name], dtype="float32")
    arrays, spec = gated(case)
    from tests.attention.kernels import cotangents, oracle

    dout, dlse = cotangents(case)
    expected = oracle(case, arrays, dout, dlse)
    found = run_reference(arrays, dout, dlse, spec)
    np.testing.assert_allclose(found.out, expected[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.grads.log_forget, expected[2]["log_forget"], rtol=1e-9, atol=1e-9)


def test_a_public_call(flash):
    """Keys before the queries, as in a cache, and padding that is NaN behind them."""
    arrays = qkv(2, t=12, s=20) | {"log_forget": gates(2, 20, 4)}
    lengths = np.array([17, 20])
    offsets = lengths - 12
    positions = np.arange(12) + offsets[:, None]
    seen = (np.arange(20) <= positions[..., None])[:, None]
    hidden = (np.arange(20) >= lengths[:, None])[:, :, None]
    call = lse_of(flash(causal=True), kv_lengths=lengths, q_offset=offsets)
    nan = {"log_forget": jnp.where(hidden, jnp.nan, arrays["log_forget"])}
    check(call, arrays, seen, positions=positions, poisoned=arrays | nan)


def test_any_leading_axes(flash):
    """Also none, with more keys than queries."""
    a, x = qkv(2, t=12, s=20), gates(2, 20, 4)
    attend = quick(lambda a, x: flash(causal=True)(**a, log_forget=x))
    both = attend(a, x)
    assert_close(attend({name: y[0] for name, y in a.items()}, x[0]), both[0])
    assert_close(attend({name: y[None] for name, y in a.items()}, x[None]), both[None])


def test_sums_lose_nothing_on_long_rows():
    """Differences between near tokens, a hundred thousand tokens into a row, where float32 has only two digits behind the point."""
    length = 100_000
    x = -np.random.default_rng(0).random((1, length, 2)).astype(np.float32)
    q = jnp.zeros((1, length, 2, 1))
    sums = quick(lambda x: log_forget.sums(AttentionArrays(q, q, q, log_forget=x)))
    coarse, rest = (np.asarray(part[0]) for part in sums(jnp.asarray(x)))
    exact = x[0].T.astype(np.float64).cumsum(-1)
    for distance in (1, 50, 1000):
        near = (coarse[:, distance:] - coarse[:, :-distance]) + (rest[:, distance:] - rest[:, :-distance])
        np.testing.assert_allclose(near, exact[:, distance:] - exact[:, :-distance], rtol=1e-6, atol=3e-5)


def hopper(**more: Any) -> Gated:
    sizes = dict[str, Any](B=1, T=330, S=330, H=2, K=2, D=128, V=128, dtype="bfloat16", right=0)
    return Gated(**{**sizes, **more})


HOPPER = {
    "causal": hopper(),
    "sinks": hopper(B=2, sinks="BH", gates="1SH"),
    "cached 96": hopper(T=200, S=300, D=96, V=80, offset=100, strength=0.2),
    "segments": hopper(B=2, T=200, S=200, segments=True),
    "window": hopper(left=140, strength=0.1),
    "without keys": hopper(T=300, S=100, left=20, offset=-100),
}
HOPPER_FORWARD = {"64": hopper(K=1, D=64, V=64), "256": hopper(T=200, S=300, D=256, V=256, offset=100)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "causal" else pytest.mark.slow) for n in HOPPER | HOPPER_FORWARD],
)
def test_hopper_emulated(name):
    """Hopper's kernels by their own code; NaN in what is hidden changes nothing."""
    from tests.attention.test_hopper_backward import emulated as backward
    from tests.attention.test_hopper_numbers import assert_agrees, tile
    from tests.attention.test_hopper_numbers import emulated as forward

    case = (HOPPER | HOPPER_FORWARD)[name]
    arrays, spec = gated(case)
    dout, dlse = cotangents(case)
    expected, size = run_reference(arrays, dout, dlse, spec), tile(128, 64 if case.D > 128 else 128)
    found = forward(arrays, spec, size)
    assert_agrees(found, expected, case.dtype)
    hides = bool(case.segments)
    assert not hides or assert_same(found, forward(poisoned(case, arrays), spec, size)) is None
    if name in HOPPER_FORWARD:
        return
    results = jnp.asarray(expected.out, arrays.q.dtype), jnp.asarray(expected.lse, jnp.float32), dout, dlse
    actual = backward(case, arrays, spec, *results)
    for part in ("q", "k", "v", "log_forget", *(["sinks"] if case.sinks else [])):
        assert_close(getattr(actual, part), getattr(expected.grads, part), "bfloat16", "gradient", name=part)
    assert not hides or assert_same(actual, backward(case, poisoned(case, arrays), spec, *results)) is None


def test_constant_gates_are_slopes(flash):
    """ALiBi with slope `m` is the gate `-m` at every token."""
    arrays, slopes = qkv(t=20, s=20), jnp.array([0.5, 0.25, 0.1, 0.01])
    call = quick(lambda **options: flash(causal=True)(**arrays, return_lse=True, **options))
    constant = jnp.broadcast_to(-slopes, (20, 4))
    for found, expected in zip(call(log_forget=constant), call(alibi_slopes=slopes), strict=True):
        assert_close(found, expected)


@pytest.mark.slow
def test_vmap(flash):
    """Gates that are mapped, or that all examples share; and gradients of either."""
    a, module = qkv(3, t=20, s=20), flash(causal=True)
    call = lambda q, k, v, x: module(q, k, v, log_forget=x)
    x = gates(3, 20, 4)
    assert_maps(call, (a["q"], a["k"], a["v"], x), (0, 0, 0, 0))
    assert_maps(call, (a["q"], a["k"], a["v"], x[0]), (0, 0, 0, None))
    grad = jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), argnums=3)
    assert_maps(grad, (a["q"], a["k"], a["v"], x[0]), (0, 0, 0, None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("platform", ["opaque", "xla"])
def test_meshes(kind, platform):
    """Split by rows and heads, without a collective forward."""
    arrays, mesh = {n: normal(i, 4, 16, 8, 8) for i, n in enumerate("qkv")}, mesh_of(kind)
    arrays["log_forget"] = gates(4, 16, 8)
    place = NamedSharding(mesh, P("dp", None, "tp"))
    sharded = {name: jax.device_put(x, place) for name, x in arrays.items()}
    module = on(platform)
    compared(lambda a: module(**a), arrays, sharded, mesh)


@pytest.mark.slow
def test_forward_mode_by_the_plain_operation():
    """Its output is that of the kernels, its derivative that along the gradient."""
    a, x, step = qkv(t=9, s=9), gates(9, 4), normal(3, 9, 4)
    of: Any = (ejx.Attention(causal=True), ejx.FlashAttention(causal=True, platform="xla"))
    plain, flash = (lambda x: of[0](**a, log_forget=x)[0]), (lambda x: of[1](**a, log_forget=x))
    out, tangent = jax.jvp(plain, (x,), (step,))
    assert_close(out, flash(x))
    (gradient,) = jax.vjp(flash, x)[1](out)
    np.testing.assert_allclose(jnp.vdot(tangent, out), jnp.vdot(gradient, step), rtol=1e-4)


@pytest.mark.slow
def test_exported_for_any_length():
    """With symbolic lengths, and gradients, as for the length alone."""
    module: Any = ejx.FlashAttention(causal=True, platform="xla")
    run = jax.jit(
        jax.value_and_grad(lambda q, k, v, x: jnp.sum(jnp.sin(module(q, k, v, log_forget=x))), (0, 3))
    )
    a, x = qkv(1, t=45, s=45), gates(1, 45, 4)
    given = (a["q"], a["k"], a["v"], x)
    (length,) = jax.export.symbolic_shape("t", constraints=["t >= 1"])
    shapes = [jax.ShapeDtypeStruct((1, length, *y.shape[2:]), y.dtype) for y in given]
    found, grads = jax.export.export(run)(*shapes).call(*given)
    expected, exact = run(*given)
    assert_close(found, expected)
    for gradient, other in zip(grads, exact, strict=True):
        assert_close(gradient, other, kind="gradient")


@pytest.mark.slow
def test_second_derivatives_on_xla():
    """A Hessian by gates against differences of gradients."""
    a, x = qkv(t=5, s=5, heads=1, kv_heads=1, d=4, v=4), gates(5, 1)
    module: Any = ejx.FlashAttention(causal=True, platform="xla")
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(3 * module(**a, log_forget=x))))
    step = normal(3, 5, 1)
    found = jnp.einsum("ahbk,bk->ah", jax.jit(jax.jacfwd(grad))(x), step)
    differences = (grad(x + 1e-2 * step) - grad(x - 1e-2 * step)) / 2e-2
    np.testing.assert_allclose(found, differences, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (dict(causal=False), {}, r"log_forget: expected None without causal=True"),
        ({}, dict(log_forget=jnp.zeros((2, 6, 2))), r"log_forget: expected floats \(2, 6, 4\), .* received float32 \(2, 6, 2\)"),
        ({}, dict(alibi_slopes=jnp.ones(4)), r"log_forget: expected None with alibi_slopes"),
        ({}, dict(log_forget=jnp.full((2, 6, 4), 0.5)), r"log_forget: expected finite numbers up to 0, received 0.5 to 0.5"),
        ({}, dict(log_forget=jnp.full((2, 6, 4), -jnp.inf)), r"log_forget: expected finite numbers up to 0, received -inf to -inf"),
    ],
)  # fmt: skip
def test_errors(options, given, message):
    arrays = qkv(2, t=6, s=6) | {"log_forget": jnp.zeros((2, 6, 4))} | given
    with pytest.raises(ValueError, match=message):
        ejx.FlashAttention(**dict(causal=True) | options)(**arrays)


@pytest.mark.parametrize("kernel", ["forward", "key_gradient", "query_gradient"])
def test_tiles_with_more_gates_than_a_sum(kernel):
    compiled = pytest.importorskip("ejkernel_eqx.attention.triton.compiled")
    tile = compiled.TileConfig(16, 16, 4, 1)
    tiles = dict.fromkeys(("forward", "key_gradient", "query_gradient"), tile)
    config = compiled.TritonConfig(**tiles | {kernel: dataclasses.replace(tile, block_k=256)})
    module = ejx.FlashAttention(causal=True, platform="triton-interpret", config=config)
    loss = lambda q: jnp.sum(module(q, q, q, log_forget=jnp.zeros((20, 2))))
    with pytest.raises(
        ValueError, match=f"config: expected tiles of up to 128 queries and keys in {kernel} with log_forget"
    ):
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((20, 2, 16), jnp.float32))


def test_which_kernels_take_it():
    """Triton's own, on Hopper those for it; the others name it."""
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.pallas import compiled as pallas
    from tests.attention.inner import cudnn
    from tests.attention.tritons import backward_tiles, compiled, tile_sizes
    from tests.compiled import DEVICES

    sizes = {"B": 4, "T": 4096, "H": 16, "D": 128}
    problem = example_problem("flash_attention", sizes, "bfloat16", {"log_forget": True})
    of = lambda sizes, **flags: example_problem(
        "flash_attention", sizes, "bfloat16", {"log_forget": True, **flags}
    )
    assert tile_sizes.problem_unfit(problem) is None and backward_tiles.problem_unfit(problem) is None
    assert "beside log_forget" in str(tile_sizes.problem_unfit(of(sizes, soft_cap=True)))
    for other in (sizes | {"D": 64}, sizes | {"D": 256}, sizes | {"K": 4}):
        assert "takes log_forget at head dims from 65 to 128" in str(backward_tiles.problem_unfit(of(other)))
        assert all(size[0] <= log_forget.CHUNK for size in tile_sizes.tiles(of(other), DEVICES["sm_90"]))
    assert compiled.unsupported(problem, DEVICES["sm_90"]) is None
    assert cudnn.unsupported(problem, DEVICES["sm_90"]) == "does not take log_forget"
    assert pallas.unsupported(problem, DEVICES["sm_90"]) == "takes no log_forget"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_fit(target):
    pytest.importorskip("triton")
    from tests.attention.test_triton_compile import check as fits

    shape: Any = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, jnp.dtype(dtype))
    arrays = AttentionArrays(shape(2, 4096, 4, 128), *[shape(2, 4096, 2, 128)] * 2)
    fits(target, arrays._replace(log_forget=shape(2, 4096, 4, dtype="float32")), AttentionSpec(0.1, right=0))


@pytest.mark.parametrize("problem", [dict(T=40, H=2, D=16), dict(B=2, T=16, S=40, H=2, K=1, D=16)])
def test_the_tuner_has_inputs_for_it(problem):
    """Gates of the call's shape, up to 0, in a problem built from words."""
    from tests.attention.inner import samples

    arrays, _ = samples.make_inputs(
        example_problem("flash_attention", problem, "float32", {"log_forget": True}), 0
    )
    assert arrays.log_forget.shape == (problem.get("B", 1), problem.get("S", problem["T"]), problem["H"]) or (
        arrays.log_forget.shape[0] == 1
    )
    assert float(arrays.log_forget.max()) < 0 and np.unique(arrays.log_forget).size > 2


@pytest.mark.parametrize("closed", [-1e3, -1e30])
def test_a_closed_gate_begins_a_row(closed):
    """What comes after it is as if the row began there, however small its number."""
    q, k, v = (jax.random.normal(key, (60, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
    x = gates(60, 2).at[20].set(closed)
    attend = ejx.FlashAttention(causal=True)
    found, rest = attend(q, k, v, log_forget=x), slice(20, None)
    assert_close(
        found[rest], np.asarray(attend(q[rest], k[rest], v[rest], log_forget=x[rest].at[0].set(-0.5)))
    )
