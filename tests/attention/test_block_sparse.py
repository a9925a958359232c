"""`BlockSparseAttention` against the float64 reference, on every platform that runs on the host."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask
from tests.attention.cases import xla_tiles
from tests.attention.dense import check, INTERPRET, lse_of, normal, qkv, quick
from tests.attention.inner import cudnn, example_problem
from tests.attention.patterns import DATA, data, defined, H, PATTERNS, S, SIZE, T, TABLE
from tests.compiled import DEVICES
from tests.tolerances import assert_close

PLATFORMS = pytest.mark.parametrize("platform", ["xla", INTERPRET])
# For type checkers, which cannot see the names in `**arrays`.
sparse: Any = ejx.BlockSparseAttention
flash: Any = ejx.FlashAttention
plain: Any = ejx.Attention
# What runs by default on the interpreter; the rest takes long.
QUICK = ("wider heads", "no such blocks", "map and pattern")


def module(platform: str, *args: Any, **options: Any) -> Any:
    """With tiles small enough for several to be at work."""
    if platform != "xla":
        pytest.importorskip("triton")
        return sparse(*args, platform=platform, **options)
    return sparse(*args, config=xla_tiles(16, 32), **options)


def poisoned(arrays: dict[str, jax.Array], seen: np.ndarray) -> dict[str, jax.Array]:
    """NaN in keys that no query sees, and queries that see no key."""
    batch, t, s = arrays["q"].shape[0], arrays["q"].shape[1], arrays["k"].shape[1]
    seen = np.broadcast_to(seen, (batch, H, t, s))
    blind, hidden = ~seen.any((1, 3)), ~seen.any((1, 2))
    put = lambda name, where: jnp.where(where[..., None, None], jnp.nan, arrays[name])
    return arrays | {"q": put("q", blind), "k": put("k", hidden), "v": put("v", hidden)}


def every(names: Any) -> Any:
    """Each platform and name; the interpreter's slow ones marked."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        ("platform", "name"),
        [
            pytest.param(p, name, marks=() if p == "xla" or name in QUICK else slow)
            for p in ("xla", INTERPRET)
            for name in names
        ],
    )


@pytest.mark.few(1)
@every(PATTERNS)
def test_patterns(platform, name):
    """Fewer queries than keys, groups of heads, dims that are no powers of two, and sinks; hidden rows hold NaN."""
    arrays = qkv(2, t=T, s=S, heads=H, kv_heads=2, d=24, v=16) | {"sinks": normal(5, H)}
    seen = defined(PATTERNS[name].sees)
    op = module(platform, PATTERNS[name].mask)
    check(lse_of(op), arrays, seen, poisoned=poisoned(arrays, seen))


@pytest.mark.few(1)
@every(DATA)
def test_arrays_that_hide(platform, name):
    given, seen = data(name)
    arrays = qkv(2, t=T, s=T, heads=H, kv_heads=1) | {"alibi_slopes": 0.05 * normal(5, H)}
    op = module(platform, block_size=SIZE, logits_soft_cap=4.0)
    check(lse_of(op, **given), arrays, seen, poisoned=poisoned(arrays, seen), cap=4.0)


@pytest.mark.few(1)
@pytest.mark.parametrize(("platform", "dtype"), [("xla", "bfloat16"), (INTERPRET, "float16")])
def test_half_precision_and_bias(platform, dtype):
    """A bias has a gradient at every visible pair, and none elsewhere."""
    arrays = qkv(2, t=40, s=40, heads=H, dtype=jnp.dtype(dtype)) | {"bias": normal(4, 1, H, 40, 40)}
    mask = PATTERNS["local or global"].mask & Mask.from_blocks(jnp.ones((3, 3), bool), 16)
    seen = defined(PATTERNS["local or global"].sees, 40, 40)
    check(lse_of(module(platform, mask)), arrays, seen)


def test_a_map_that_heads_share_beside_numbers_of_64_bits():
    arrays = qkv(2, t=40, s=40, heads=H)
    op = module("xla", Mask.from_blocks(TABLE[0, :3, :3], 16) | Mask.sliding_window(4))
    expected = op(**arrays)
    with jax.enable_x64(True):
        assert_close(op(**arrays), np.asarray(expected))


@PLATFORMS
def test_nothing_visible(platform):
    """Every row gives 0, whatever it holds."""
    nothing = Mask.causal() & ~Mask.causal()
    arrays = qkv(1, t=20, s=20, heads=H)
    seen = np.zeros((20, 20), bool)
    check(lse_of(module(platform, nothing)), arrays, seen, poisoned=poisoned(arrays, seen))


@PLATFORMS
def test_maps_of_a_module_and_of_a_call_intersect(platform):
    """Static in the module, and data in the call; with heads and without."""
    own, given = TABLE[:, :5, :5], jnp.asarray(TABLE[0, :5, 1:])
    i = np.arange(T)
    blocks = lambda x: np.asarray(x)[..., (i // 16)[:, None], i // 16]
    arrays = qkv(t=T, s=T, heads=H)
    op = module(platform, Mask.causal(), own, 16)
    seen = blocks(own) & blocks(given) & (i <= i[:, None])
    expected = flash(platform="xla")(**arrays, mask=jnp.asarray(seen))
    assert_close(op(**arrays, block_map=given), expected, "float32", name="out")


@PLATFORMS
def test_transformations(platform):
    """jit with a map as data, vmap over it, and a scan over layers that have maps of their own."""
    tables = jnp.asarray(np.random.default_rng(3).random((3, 1, 3, 3)) < 0.6)
    arrays = qkv(3, t=40, s=40, heads=2, kv_heads=2)
    op = module(platform, Mask.causal() | Mask.strided(5), block_size=16)
    call: Any = lambda q, k, v, table: op(q, k, v, block_map=table)
    one = [x[0] for x in arrays.values()]
    each = [call(*(x[n] for x in arrays.values()), tables[n]) for n in range(3)]
    together = quick(jax.vmap(call))(*arrays.values(), tables)
    assert_close(together, jnp.stack(each), "float32", name="vmap")

    def layers(x):
        return jax.lax.scan(lambda x, table: (x + call(x, x, x, table), None), x, tables)[0]

    def unrolled(x):
        for table in tables:
            x = x + call(x, x, x, table)
        return x

    gradient = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())(one[0])
    assert_close(gradient(layers), gradient(unrolled), "float32", "gradient", name="scan")


def test_a_module_is_a_pytree():
    """Arrays of its mask are data: under `filter_jit` other maps need no other program; and any operation takes these masks."""
    arrays = qkv(t=40, s=40, heads=2, kv_heads=2)
    traces = []

    @eqx.filter_jit
    def call(op, arrays):
        traces.append(None)
        return op(**arrays)

    for seed in range(2):
        table = jnp.asarray(np.random.default_rng(seed).random((3, 3)) < 0.6)
        op = sparse(block_map=table, block_size=16, platform="xla")
        expected = plain()(**arrays, mask=Mask.from_blocks(table, 16))[0]
        assert_close(call(op, arrays), expected, "float32", name="out")
    assert len(traces) == 1


def test_functions_that_close_over_traced_arrays():
    """They are dense masks, and right."""
    ids = jnp.arange(40) // 7
    arrays = qkv(t=40, s=40, heads=2, kv_heads=2)

    @jax.jit
    def call(arrays, ids):
        mask = Mask.from_function(lambda h, q, k: (ids[q] == ids[k]) & (k <= q))
        return sparse(mask, platform="xla")(**arrays)

    expected = flash(causal=True, platform="xla")(**arrays, segment_ids=ids)
    assert_close(call(arrays, ids), expected, "float32", name="out")


@PLATFORMS
def test_positions_that_are_data(platform):
    """A function of positions that differ between rows, as when keys are cached."""
    arrays, offsets = qkv(2, t=9, s=40, heads=2, kv_heads=1), np.array([31, 12])
    mask = Mask.causal() & (Mask.sliding_window(5) | Mask.global_tokens(4))
    position, j = (offsets[:, None] + np.arange(9))[:, None, :, None], np.arange(40)
    seen = (j <= position) & ((j >= position - 5) | (position < 4) | (j < 4))
    check(lse_of(module(platform, mask), q_offset=offsets), arrays, seen)


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


def _distance(s: Any, q: Any, k: Any) -> Any:
    return (k - q).astype(s.dtype)


KNOWN = {
    "soft cap": (lambda s, h, q, k: 4 * jnp.tanh(s / 4), {}, 4.0),
    "both": (
        lambda s, h, q, k: jnp.tanh(0.25 * s) * 4 + jnp.asarray(SLOPES)[h] * _distance(s, q, k),
        {"alibi_slopes": SLOPES},
        4.0,
    ),
    "nothing": (lambda s, h, q, k: s, {}, None),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KNOWN)
@PLATFORMS
def test_functions_of_scores_that_have_names(platform, name):
    """On every platform, as what they are."""
    function, extra, cap = KNOWN[name]
    arrays = qkv(2, t=40, s=40, heads=H)
    mask = PATTERNS["local or global"].mask
    expected = module(platform, mask, logits_soft_cap=cap)(
        **arrays, **{n: jnp.asarray(x) for n, x in extra.items()}
    )
    assert_close(module(platform, mask, score_mod=function)(**arrays), expected, "float32", name="out")


UNKNOWN = {
    "cube": (lambda s, h, q, k: s + s**3 / 20, lambda s, h, q, k: (s + s**3 / 20, 1 + 3 * s**2 / 20)),
    "of heads and positions": (
        lambda s, h, q, k: jnp.where(q > k + 5, s * (h + 1).astype(s.dtype), s - 0.1 * jnp.abs(_distance(s, q, k))),
        lambda s, h, q, k: (np.where(q > k + 5, s * (h + 1), s - 0.1 * abs(k - q)), np.where(q > k + 5, h + 1.0, 1.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_functions_of_scores(name):
    """Against their definition in float64, gradients included; hidden keys hold NaN, and positions count from the keys."""
    function, exact_function = UNKNOWN[name]
    t, s, scale = 30, 37, 0.5
    arrays = qkv(2, t=t, s=s, heads=H, kv_heads=H, d=8, v=8)
    known = Mask.causal() & Mask.sliding_window(20) & Mask.from_lengths(kv_lengths=33)
    h, i, j = np.ogrid[:H, s - t : s, :s]
    seen = (j <= i) & (j >= i - 20) & (j < 33)
    op = sparse(known, softmax_scale=scale, score_mod=function, config=xla_tiles(16, 16))
    dout, dlse = normal(8, 2, t, H, 8), normal(9, 2, t, H)
    given = poisoned(arrays, seen)
    (out, lse), pull = jax.vjp(lambda a: op(**a, return_lse=True), given)
    grads = pull((dout, dlse))[0]

    q, k, v, do, dl = (np.asarray(x, np.float64) for x in (*arrays.values(), dout, dlse))
    scores, slope = exact_function(scale * np.einsum("bthd,bshd->bhts", q, k), h, i, j)
    scores = np.where(seen, scores, -np.inf)
    exact_lse = np.log(np.exp(scores).sum(-1, keepdims=True))
    weights = np.exp(scores - exact_lse)
    dweights = np.einsum("bthv,bshv->bhts", do, v)
    change = dl.swapaxes(1, 2)[..., None] - (weights * dweights).sum(-1, keepdims=True)
    before = scale * slope * weights * (dweights + change)
    assert_close(out, np.einsum("bhts,bshv->bthv", weights, v), "float32", name="out")
    assert_close(lse, exact_lse[..., 0].swapaxes(1, 2), "float32", name="lse")
    assert_close(grads["q"], np.einsum("bhts,bshd->bthd", before, k), "float32", "gradient", name="q")
    assert_close(grads["k"], np.einsum("bhts,bthd->bshd", before, q), "float32", "gradient", name="k")
    assert_close(grads["v"], np.einsum("bhts,bthv->bshv", weights, do), "float32", "gradient", name="v")


def test_other_functions_of_scores_run_on_xla():
    """Others say what they take. A soft cap is one only where nothing comes before it."""
    pytest.importorskip("triton")
    arrays = qkv(t=20, s=20, heads=H)
    op = sparse(score_mod=UNKNOWN["cube"][0], platform=INTERPRET)
    with pytest.raises(ejx.UnsupportedError, match="takes a score_mod only if it is cap"):
        op(**arrays)
    capped = sparse(score_mod=KNOWN["soft cap"][0], platform=INTERPRET)
    with pytest.raises(ejx.UnsupportedError, match="takes a score_mod only if"):
        capped(**arrays, bias=normal(1, 1, 20, 20))
    bias = normal(1, 1, 20, 20)
    scores = jnp.einsum("thd,shd->hts", arrays["q"] / 4, arrays["k"].repeat(2, 1)) + bias
    weights = jax.nn.softmax(4 * jnp.tanh(scores / 4))
    expected = jnp.einsum("hts,shv->thv", weights, arrays["v"].repeat(2, 1))
    found = sparse(score_mod=KNOWN["soft cap"][0], platform="xla")(**arrays, bias=bias)
    assert_close(found, expected, "float32", name="out")


def test_hidden_tiles_are_not_computed():
    """In plain XLA the loop is over visible tiles alone, whichever head sees them."""
    arrays = qkv(t=64, s=64, heads=2, kv_heads=2)
    near = Mask.from_function(lambda h, q, k: jnp.where(h == 0, abs(q - k) < 4, abs(q - k) < 12))
    for mask, most in ((near, 10), (Mask.causal(), 10), (near & Mask.causal(), 7)):
        op = sparse(mask, config=xla_tiles(16, 16))
        text = str(jax.make_jaxpr(lambda a, op=op: op(**a))(arrays))
        assert f"length={most}\n" in text or f"length={most} " in text, mask


def test_explanation():
    """The problem says how much is visible."""
    arrays = qkv(1, t=1024, s=1024, heads=2, kv_heads=2)
    shapes = jax.eval_shape(lambda: arrays)
    op = sparse(Mask.sliding_window(100, 100) | Mask.strided(2048))
    text = str(ejx.explain(op, *shapes.values()))
    assert "tiles=1/4" in text and "block_sparse_attention" in text
    assert "tiles" not in str(ejx.explain(sparse(Mask.causal()), *shapes.values()))


def of(sizes: dict[str, int], flags: dict[str, Any]) -> Any:
    return example_problem("block_sparse_attention", sizes, "bfloat16", flags)


def test_cudnn_is_not_offered_patterns():
    sizes = dict(T=512, H=4, D=64)
    assert cudnn.unsupported(of(sizes, {"top_left": True}), DEVICES["sm_90"]) is None
    for flags in ({"tiles": "1/4"}, {"block_size": 64}):
        assert "maps of blocks" in str(cudnn.unsupported(of(sizes, flags), DEVICES["sm_90"]))


@pytest.mark.parametrize("size", [64, 128])
def test_kernels_prefer_tiles_that_make_up_a_block(size):
    from tests.attention.tritons import compiled

    problem = of(dict(T=4096, H=16, D=128), {"block_size": size, "causal": False})
    for device in DEVICES.values():
        for tile in dataclasses.astuple(compiled.default_config(problem, device))[:3]:
            assert size % tile[0] == 0 and size % tile[1] == 0


WRONG = {
    "block_size: expected an int of at least 1": lambda: sparse(block_size=0),
    "block_map: expected 2 by 2 blocks": lambda: sparse(block_map=np.ones((2, 3), bool), block_size=16)(
        **qkv(t=20, s=20)
    ),
    "block_map: expected 1 or 4 heads": lambda: sparse(block_size=16)(
        **qkv(t=20, s=20), block_map=jnp.ones((3, 2, 2), bool)
    ),
    "score_mod: expected one float32": lambda: sparse(score_mod=lambda s, h, q, k: s > 0),
    "score_mod: expected a function that closes over known values": lambda: jax.jit(
        lambda x: sparse(score_mod=lambda s, h, q, k: s + x)(**qkv(t=4, s=4))
    )(1.0),
    "f: expected one boolean": lambda: sparse(Mask.from_function(lambda h, q, k: k)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises(ValueError) as caught:
        WRONG[message]()
    assert str(caught.value).startswith(message)
