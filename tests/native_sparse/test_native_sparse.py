"""Native sparse attention on XLA and by its Triton kernels, interpreted: against numpy, packed, padded, composed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import assert_same
from tests.attention.dense import INTERPRET, normal, quick
from tests.native_sparse.cases import by_hand, Case, CASES, importance, LEARNED, make, results
from tests.native_sparse.problems import OPERATION, platform_of
from tests.tolerances import assert_close

# On XLA every option and pairs of them, interpreted every case.
ON_XLA = ("plain", "packed", "rows at places", "long spans", "packed, overlapping", "learned")
DEFAULT = [("xla", "packed, overlapping"), (INTERPRET, "packed")]
EVERYWHERE = [*(("xla", name) for name in ON_XLA), *((INTERPRET, name) for name in CASES)]


@pytest.fixture(autouse=True)
def _needs_triton(request):
    if INTERPRET in request.node.name:
        pytest.importorskip("triton")


def assert_agrees(case, found, expected):
    assert_close(found["out"], expected["out"], case.dtype, name="out")
    for name in LEARNED:
        if name in found:
            dtype = "float32" if name == "gates" and case.dtype == "float32" else case.dtype
            assert_close(found[name], expected[name], dtype, "gradient", name=name)


@pytest.mark.parametrize(
    "platform, name",
    [pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow) for case in EVERYWHERE],
)
def test_agrees_with_numpy(platform, name):
    """Output and gradients for the blocks that were chosen, which are the best; nothing changes if what is not seen is NaN."""
    case = CASES[name]
    arrays, dout = make(case)
    op, others = case.operation(platform), case.others()
    found = results(op, arrays, others, dout)
    assert_agrees(case, found, by_hand(case, arrays, found["indices"], dout))
    place, first = case.starts()
    assert_best(case, arrays, np.asarray(found["indices"]), place, first)
    padding = place < 0
    unseen = np.arange(case.keys) > place.max(-1, keepdims=True) if case.offsets is None else padding
    if padding.any() or unseen.any():
        hidden = {"q": padding, "gates": padding, "k": unseen, "v": unseen}
        poisoned = {
            n: jnp.where(hidden[n][..., None, None], jnp.nan, x) if n in hidden else x
            for n, x in arrays.items()
        }
        again = results(op, poisoned, others, jnp.where(padding[..., None, None], jnp.nan, dout))
        assert_same(again, found)
        assert not np.asarray(found["out"])[padding].any() and not np.asarray(found["k"])[unseen].any()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # an interpreted platform's configuration is the same for every problem
@pytest.mark.parametrize("name", ["packed", "rows at places", "uneven blocks"])
def test_the_forward_by_blocks_is_that_by_queries(name, monkeypatch):
    """Blocks that are given too, in several chunks of queries, with keys that none sees NaN."""
    from ejkernel_eqx.native_sparse.triton import by_blocks
    from ejkernel_eqx.native_sparse.triton.tiles import ForwardTile

    case, default = CASES[name], platform_of(OPERATION, INTERPRET).default_config(None, None)
    config = dataclasses.replace(default, forward=ForwardTile(2, 4, 4, 1))
    arrays, _ = make(case)
    place, _ = case.starts()
    unseen = np.arange(case.keys) > place.max(-1, keepdims=True) if case.offsets is None else place < 0
    arrays |= {n: jnp.where(unseen[..., None, None], jnp.nan, arrays[n]) for n in ("k", "v")}
    size = case.count * int(np.prod(case.lead)) * case.H * case.V * jnp.dtype(case.dtype).itemsize
    monkeypatch.setattr(by_blocks, "_BYTES", 15 * size)
    given = np.random.default_rng(9).integers(-2, 12, (*case.lead, case.T, case.K, case.count))
    plainly: Any = lambda op, given: op(**given)
    # With a gradient, the selected branch is kept apart.
    kept: Any = lambda op, given: jax.vjp(lambda q: op(**given | {"q": q}), given["q"])[0]
    for of, more in ((plainly, {}), (kept, {"block_indices": jnp.asarray(given)})):
        call = arrays | case.others() | more
        found, expected = (of(case.operation(INTERPRET, config=which), call) for which in (config, None))
        assert_close(found, np.asarray(expected), case.dtype, name="out")


@pytest.mark.slow
def test_choosing_among_many_blocks(monkeypatch):
    """Kept in a warp's lanes by groups: the same blocks in the same order, and of equal ones the earlier."""
    pytest.importorskip("triton")
    case = Case(B=1, H=2, K=1, count=9, T=131, offsets=(0, 5, 131))
    arrays, _ = make(case)
    alike = arrays | {"k": jnp.ones_like(arrays["k"])}
    call = lambda given: case.operation(INTERPRET)(**given, **case.others(), return_indices=True)[1]
    expected = [call(x) for x in (arrays, alike)]
    monkeypatch.setattr("ejkernel_eqx.native_sparse.triton.choice._MANY_BLOCKS", 32)
    for x, indices in zip((arrays, alike), expected):
        np.testing.assert_array_equal(call(x), indices)


def assert_best(case, arrays, indices, place, first):
    """Its own block, then the first, then blocks none of which is worse than one that was left out; each once."""
    own = np.where(place < 0, -1, (place - first) // case.block)
    assert (indices[..., 0] == own[..., None]).all()
    if case.count > 1:
        assert (indices[..., 1] == np.where(own > 0, 0, -1)[..., None]).all()
    assert ((indices >= 0).sum(-1) == np.minimum(own + 1, case.count)[..., None]).all()
    if not case.compressed():
        return
    score = importance(case, arrays)
    taken = np.zeros(score.shape, bool)
    for n in range(indices.shape[-1]):
        np.put_along_axis(taken, np.maximum(indices[..., n], 0)[..., None], True, -1)
    assert (taken.sum(-1) == np.maximum((indices >= 0).sum(-1), 1)).all()  # block 0 stands for none
    chosen = indices[..., 2:]
    worst = np.where(chosen >= 0, np.take_along_axis(score, np.maximum(chosen, 0), -1), np.inf).min(
        -1, initial=np.inf
    )
    left = np.where(taken, -np.inf, score).max(-1)
    assert (worst >= left - 1e-2 if case.dtype != "float32" else worst >= left - 1e-5).all()


@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_blocks_that_are_given(platform):
    """-1, later blocks and repetitions select nothing; a query without blocks has the other two branches alone."""
    case = CASES["plain"]
    arrays, dout = make(case)
    indices = np.random.default_rng(9).integers(-2, 12, (2, case.T, case.K, 5))
    indices[:, 7] = -1
    found = results(case.operation(platform), arrays, {"block_indices": jnp.asarray(indices)}, dout)
    assert_agrees(case, found, by_hand(case, arrays, indices, dout))
    returned = np.asarray(found["indices"])
    assert (returned[:, 7] == -1).all() and (returned * case.block <= np.arange(case.T)[:, None, None]).all()
    assert len({*returned[0, 20, 0].tolist()} - {-1}) == (returned[0, 20, 0] >= 0).sum()


def test_a_cache_is_decoded_like_the_whole():
    """One query at a time over a cache with room, whose rest is NaN, with compressed keys of its own."""
    case = Case(T=21)
    arrays, _ = make(case)
    op: Any = case.operation("xla")
    whole = op(**arrays)
    room = [(0, 0), (0, 8), (0, 0), (0, 0)]
    pools = {name: jnp.pad(arrays[name], room, constant_values=jnp.nan) for name in "kv"}
    means = {f"compressed_{n}": jnp.nanmean(x[:, :28].reshape(2, 7, 4, 2, 16), 2) for n, x in pools.items()}

    @jax.jit
    def step(place):
        own = {n: jax.lax.dynamic_slice_in_dim(arrays[n], place, 1, 1) for n in ("q", "gates")}
        later = (jnp.arange(29) > place)[:, None, None]
        now = {n: jnp.where(later, jnp.nan, x) for n, x in pools.items()}
        return op(**own, **now, **means, q_offset=place)

    for place in (0, 3, 4, 20):
        assert_close(step(jnp.int32(place))[:, 0], np.asarray(whole[:, place]))


@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_forward_mode_is_refused_without_a_platform_that_has_none(platform):
    case = Case(T=5)
    arrays, _ = make(case)
    call = lambda q: case.operation(platform)(**arrays | {"q": q})
    with pytest.raises(ejx.UnsupportedError, match=r"\nNo platform has forward mode for it; use jax\.grad"):
        jax.jvp(call, (arrays["q"],), (arrays["q"],))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_transformations(platform):
    """`vmap`, `scan` and `jax.checkpoint` of the gradient give what single calls give."""
    case = Case(T=13, B=3)
    arrays, dout = make(case)
    op = case.operation(platform)
    loss = lambda arrays, dout: (op(**arrays) * dout).sum()
    whole = jax.jit(jax.grad(loss))(arrays, dout)
    each = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(arrays, dout)
    scanned = jax.jit(
        lambda: jax.lax.scan(lambda _, x: (None, jax.grad(loss)(*x)), None, (arrays, dout))[1]
    )()
    for name, x in whole.items():
        assert_close(each[name], np.asarray(x), kind="gradient", name=name)
        assert_close(scanned[name], np.asarray(x), kind="gradient", name=name)


@pytest.mark.slow
def test_packed_rows_under_vmap():
    case = Case(T=20, offsets=(0, 7, 18))
    arrays, _ = make(case)
    op, offsets = case.operation("xla"), jnp.array([[0, 7, 18], [0, 12, 20]])
    both = jax.vmap(lambda offsets: op(**arrays, cu_seqlens=offsets))(offsets)
    for row, own in zip(both, offsets):
        np.testing.assert_allclose(row, op(**arrays, cu_seqlens=own), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_many_chunks_of_queries(monkeypatch):
    """The choice and the gathered blocks do not depend on how many queries there are at a time."""
    from ejkernel_eqx.native_sparse import selection, xla

    case = Case(T=45, B=1)
    arrays, dout = make(case)
    whole = results(case.operation("xla"), arrays, {}, dout)
    monkeypatch.setattr(selection, "_BYTES", 4096)
    monkeypatch.setattr(xla, "_BYTES", 16384)
    parts = results(case.operation("xla"), arrays, {"q_offset": jnp.array([0])}, dout)
    for name, x in whole.items():
        np.testing.assert_allclose(np.asarray(parts[name]), np.asarray(x), rtol=1e-4, atol=1e-5, err_msg=name)


def test_no_array_of_scores():
    """Memory is linear in the queries but for compressed keys: nothing has the size of queries by keys."""
    op = ejx.NativeSparseAttention(16, 4, 32, platform="xla")
    q, k = normal(0, 1, 2048, 2, 8), normal(1, 1, 2048, 1, 8)
    gates = jnp.ones((1, 2048, 2, 3))
    memory: Any = (
        jax.jit(jax.grad(lambda q, k: op(q, k, k, gates).sum())).lower(q, k).compile().memory_analysis()
    )
    assert memory.temp_size_in_bytes < 4 * 2048 * 2048 * 8


def test_nothing_to_attend():
    op = ejx.NativeSparseAttention(4, 2, 3)
    empty = jnp.zeros((2, 0, 2, 8))
    out, indices = op(empty, empty, empty, jnp.zeros((2, 0, 2, 3)), return_indices=True)
    assert out.shape == (2, 0, 2, 8) and indices.shape == (2, 0, 2, 2)


def test_errors():
    op, one = ejx.NativeSparseAttention(4, 2, 3), lambda *shape: jnp.zeros(shape)
    given = {"q": one(2, 8, 4, 16), "k": one(2, 8, 2, 16), "v": one(2, 8, 2, 16), "gates": one(2, 8, 4, 3)}
    row = {name: x[0] for name, x in given.items()}
    calls = {
        "gates: expected": given | {"gates": one(2, 8, 4, 2)},
        "divides the 4 heads": given | {"k": one(2, 8, 3, 16), "v": one(2, 8, 3, 16)},
        "dtype of q": given | {"k": given["k"].astype("bfloat16")},
        "both or neither": given | {"compressed_k": given["k"]},
        "block_indices: expected ints": given | {"block_indices": jnp.zeros((2, 8, 4, 2), int)},
        "q_offset: expected None": row | {"cu_seqlens": [0, 8], "q_offset": 1},
        "leading axes": given | {"cu_seqlens": [0, 8]},
        "as many tokens": row | {"k": row["k"][:4], "v": row["v"][:4], "cu_seqlens": [0, 4]},
    }
    for word, call in calls.items():
        with pytest.raises(ValueError, match=word):
            op(**call)
    with pytest.raises(ValueError, match="compression_stride"):
        ejx.NativeSparseAttention(6, compression_size=4)
    for name, value in {"num_blocks": 0, "softmax_scale": float("nan")}.items():
        with pytest.raises(ValueError, match=name):
            ejx.NativeSparseAttention(**{name: value})


@pytest.mark.parametrize("platform", ["xla", pytest.param(INTERPRET, marks=pytest.mark.slow)])
def test_segments(platform):
    """Rows of segments, with padding between them, are what their sequences are alone; forward and gradients, and under `vmap`."""
    case = Case(T=26, B=2, block=4, count=3, span=4, stride=2, H=2, K=1, D=8, V=8)
    arrays, dout = make(case)
    ids = np.array([[5] * 11 + [-1] * 2 + [5] * 6 + [2] * 7, [-3] * 3 + [1] * 1 + [0] * 22])
    runs = [(0, 0, 11), (0, 13, 19), (0, 19, 26), (1, 3, 4), (1, 4, 26)]
    op, padding = case.operation(platform), jnp.asarray(ids < 0)[..., None, None]
    poisoned = {name: jnp.where(padding, jnp.nan, x) for name, x in arrays.items()}
    found = results(op, poisoned, {"segment_ids": jnp.asarray(ids)}, dout)
    for row, begin, end in runs:
        take = lambda x: np.asarray(x)[row : row + 1, begin:end]  # noqa: B023
        own = {name: take(x) for name, x in arrays.items()}
        alone, indices = dataclasses.replace(case, T=end - begin, B=1), take(found["indices"])
        expected = by_hand(alone, own, indices, take(dout))
        assert_best(alone, own, indices, *alone.starts())
        for name, x in expected.items():
            kind = "forward" if name == "out" else "gradient"
            assert_close(take(found[name]), x, kind=kind, scale=1.0, name=name)
    for name, x in found.items():
        if name != "indices":
            assert not np.asarray(x)[ids < 0].any(), name
    mapped = quick(jax.vmap(lambda arrays, ids: op(**arrays, segment_ids=ids, max_segments=3)))
    assert_close(mapped(arrays, jnp.asarray(ids)), np.asarray(found["out"]))
    cut = op(**arrays, segment_ids=jnp.asarray(ids), max_segments=2)
    assert not np.asarray(cut)[0, 19:].any() and np.asarray(cut)[0, 18].any()
