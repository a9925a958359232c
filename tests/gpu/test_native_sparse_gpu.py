"""Native sparse attention on a GPU: the Triton kernels against numpy in float64, repeated runs, and every candidate of the tuner.

```sh
python -m pytest tests/gpu/test_native_sparse_gpu.py -n 8
```
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.tuning.explain import example_problem_of
from tests.native_sparse.cases import by_hand, Case, CASES, LEARNED, make, results
from tests.native_sparse.test_paged import Case as Paged
from tests.native_sparse.test_paged import CASES as PAGED_CASES
from tests.native_sparse.test_paged import make as make_paged
from tests.native_sparse.test_paged import run as run_paged
from tests.native_sparse.test_paged import sequences
from tests.native_sparse.test_step import CASES as STEPS
from tests.native_sparse.test_step import ROWS
from tests.tolerances import assert_close, errors

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "native_sparse_attention"
REPEATS = 4


LARGE = {
    "a group of 16": Case(T=600, B=1, H=16, K=1, D=128, V=128, block=64, count=5, window=100),
    "paper": Case(T=700, B=1, H=8, K=2, D=64, V=64, block=64, count=6, window=128, span=32, stride=16),
    "packed": Case(T=700, H=8, K=2, D=100, V=64, block=32, count=4, window=50, offsets=(0, 1, 300, 300, 650)),
    "rows at places": Case(
        T=3, S=900, H=8, K=2, D=64, V=64, block=64, count=4, window=64, q_offset=(100, 897)
    ),
    "few queries": Case(
        T=2, S=5000, H=32, K=2, D=128, V=128, block=64, count=8, window=512, q_offset=(4998, 3000)
    ),
    "many heads": Case(T=150, H=40, K=1, D=32, V=48, block=16, count=3, window=9),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CASES | LARGE)
def test_native_sparse(name, dtype):
    """Output and gradients; the same bit for bit when run again."""
    case = dataclasses.replace((CASES | LARGE)[name], dtype=dtype)
    arrays, dout = make(case)
    op, others = case.operation("triton"), case.others()
    found = results(op, arrays, others, dout)
    expected = by_hand(case, arrays, found["indices"], dout)
    assert_close(found["out"], expected["out"], dtype, name="out")
    for array in LEARNED:
        if array in found:
            assert_close(found[array], expected[array], dtype, "gradient", name=array)
    for _ in range(REPEATS):
        again = results(op, arrays, others, dout)
        for key, value in found.items():
            np.testing.assert_array_equal(np.asarray(again[key]), np.asarray(value), err_msg=key)


@pytest.mark.parametrize("name", LARGE)
def test_chooses_as_xla_does(name):
    """Where two blocks are not almost as good."""
    case = LARGE[name]
    arrays, _ = make(case)

    def chosen(platform):
        op = case.operation(platform)
        indices = jax.jit(lambda: op(**arrays, **case.others(), return_indices=True)[1])()
        return np.sort(np.asarray(indices), -1)

    ours, theirs = chosen("triton"), chosen("xla")
    assert (ours == theirs).all(-1).mean() > 0.99


def test_segments():
    """Rows of segments with padding between them are what packed sequences are."""
    case = Case(T=700, B=1, H=8, K=2, D=64, V=64, block=32, count=4, window=50, span=32, stride=16)
    arrays, dout = make(case)
    ids = jnp.asarray(np.repeat([4, -1, 4, 0, 9], [300, 7, 1, 292, 100]))[None]
    found, expected = (
        results(case.operation(p), arrays, {"segment_ids": ids}, dout) for p in ("triton", "xla")
    )
    for name, x in expected.items():
        if name != "indices":
            assert_close(
                found[name],
                np.asarray(x),
                kind="forward" if name == "out" else "gradient",
                scale=1.0,
                name=name,
            )


def test_xla_repeats():
    """The gradients of platform `xla` are the same in every run, too."""
    case = LARGE["paper"]
    arrays, dout = make(case)
    op = case.operation("xla")
    first = results(op, arrays, {}, dout)
    for _ in range(REPEATS):
        for name, x in results(op, arrays, {}, dout).items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(first[name]), err_msg=name)


_OVERLAPPING: Any = dict(window=100, span=32, stride=16)
PAGED = {
    "decodes": Paged(
        (3000, 64, 0, 999),
        (1, 1, 1, 1),
        H=32,
        D=128,
        V=128,
        page=64,
        block=64,
        count=8,
        window=512,
        span=64,
        stride=64,
    ),
    "paper": Paged(
        (900, 2000), (1, 300), H=16, K=1, D=64, V=64, page=64, block=64, count=4, rest=3, **_OVERLAPPING
    ),
    "small pages": Paged((300, 500), (5, 1), H=8, D=100, V=64, page=16, block=32, count=4, **_OVERLAPPING),
    "groups of 64": Paged(
        (700, 129),
        (2, 1),
        H=64,
        K=1,
        D=128,
        V=128,
        page=64,
        block=64,
        count=4,
        window=130,
        span=64,
        stride=64,
    ),
    "blocks of 256": Paged(
        (4000, 600),
        (1, 3),
        H=16,
        K=1,
        D=256,
        V=256,
        page=64,
        block=256,
        count=3,
        window=100,
        span=64,
        stride=64,
    ),
}
# A page that is missing has no dense counterpart.
PAGED |= {f"step, {name}": case for name, case in STEPS.items() if not case.missing}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PAGED_CASES | PAGED)
def test_pages(name, dtype):
    """As `tests/native_sparse/test_paged.py`, whose unused slots hold NaN; the same bit for bit when run again."""
    case = dataclasses.replace((PAGED_CASES | PAGED)[name], dtype=dtype)
    dense, call = make_paged(case)
    op = case.operation("triton")
    out, indices = run_paged(op, call)
    for n, rows, own in sequences(case):
        arrays = {key: x[None] for key, x in dense[n].items()}
        if own.compressed():
            expected = by_hand(own, arrays, indices[None, rows], np.zeros((1, own.T, case.H, case.V)))
            assert_close(out[None, rows], expected["out"], dtype, name=f"sequence {n}")
    for _ in range(REPEATS):
        again = run_paged(op, call)
        np.testing.assert_array_equal(again[0], out)
        np.testing.assert_array_equal(again[1], indices)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ROWS)
def test_steps_over_rows(name, dtype):
    """Decoding without a gradient, which has kernels of its own; the same bit for bit when run again."""
    case = dataclasses.replace(ROWS[name], dtype=dtype)
    arrays, _ = make(case)
    call = jax.jit(lambda x: case.operation("triton")(**x, **case.others(), return_indices=True))
    out, indices = call(arrays)
    expected = by_hand(case, arrays, np.asarray(indices), np.zeros(out.shape))
    assert_close(np.asarray(out.astype(jnp.float32)), expected["out"], dtype)
    for _ in range(REPEATS):
        for first, again in zip((out, indices), call(arrays)):
            np.testing.assert_array_equal(np.asarray(again), np.asarray(first))


@pytest.mark.parametrize("sequences", [2, 40])
def test_a_step_at_64k(sequences):
    """Several programs and one for the keys of a query; against kernels for each branch, and against XLA for the same blocks."""
    from ejkernel_eqx.native_sparse.triton.steps import BY_BRANCH

    pages, (block, length) = 1024, (64, 65536)
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 6)
    table = jnp.asarray(np.stack([rng.permutation(pages) for _ in range(sequences)]))
    random = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    lengths = jnp.asarray(rng.integers(1, length, sequences).tolist()[:-1] + [length])
    cache = ejx.PagedKVCache(random(keys[0], pages, block, 4, 128), random(keys[1], pages, block, 4, 128))
    small = ejx.PagedKVCache(random(keys[2], pages, 1, 4, 128), random(keys[3], pages, 1, 4, 128))
    cache = cache.bind(table, lengths)
    q, gates = random(keys[4], sequences, 64, 128), jax.nn.sigmoid(random(keys[5], sequences, 64, 3))
    problem = example_problem_of("paged_native_sparse_attention")(
        "paged_native_sparse_attention", dict(N=sequences, S=length, H=64, K=4, D=128), "bfloat16", {}
    )
    config: Any = (
        kernel_registry.get("paged_native_sparse_attention", "triton")
        .load()
        .default_config(problem, device_facts())
    )
    assert config.step.block_k and (config.step.split_k == 1) == (sequences == 40)
    run = lambda platform, config=None, **more: ejx.PagedNativeSparseAttention(
        block, 16, 512, platform=platform, config=config
    )(q, gates, cache, small, return_indices=True, **more)
    out, blocks = run("triton", config)
    other, others = run("triton", dataclasses.replace(config, step=BY_BRANCH))
    assert (np.sort(np.asarray(blocks), -1) == np.sort(np.asarray(others), -1)).all(-1).mean() > 0.95
    expected, _ = run("xla", block_indices=blocks)
    assert_close(np.asarray(out.astype(jnp.float32)), np.asarray(expected.astype(jnp.float32)), "bfloat16")
    assert np.isfinite(np.asarray(other.astype(jnp.float32))).all()


CANDIDATES = {
    "rows": ("native_sparse_attention", dict(T=1024, H=16, K=2, D=128, n=6), {}),
    "given": ("native_sparse_attention", dict(T=1024, H=16, K=2, D=128, n=6), {"given": True}),
    "packed": ("native_sparse_attention", dict(T=1024, H=16, K=2, D=128, n=6, N=3), {"packed": True}),
    "few": ("native_sparse_attention", dict(T=1, S=8192, B=2, H=16, K=2, D=128, n=6), {"placed": True}),
    "pages": ("paged_native_sparse_attention", dict(N=4, S=8192, H=16, K=2, D=128, n=6), {}),
    "chunks": (
        "paged_native_sparse_attention",
        dict(N=4, T=512, S=4096, H=16, K=2, D=128, n=6),
        {"given": True},
    ),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate(name):
    operation, dims, flags = CANDIDATES[name]
    problem = example_problem_of(operation)(operation, dims, "bfloat16", {"window": 200, **flags})
    implementation = kernel_registry.get(operation, "triton")
    work = implementation.make_workload(problem)
    assert work is not None
    inputs = work.make_inputs(0)
    reference = work.reference(inputs)
    for config in implementation.load().candidates(problem, device_facts()):
        found = jax.jit(work.run, static_argnums=1)(inputs, config)
        for name, allowed in work.tolerances.items():
            measured = errors(found[name], reference[name])
            assert measured.rms <= allowed.rms and measured.peak <= allowed.peak, (config, name, measured)


def test_a_long_sequence(monkeypatch):
    """Lists of many pieces and several chunks of queries, whose results are written into one array, against XLA for the first and the last queries,
    without a gradient and with one."""
    from ejkernel_eqx.native_sparse.triton import by_blocks

    monkeypatch.setattr(by_blocks, "_BYTES", 2**27)
    jax.clear_caches()  # what has been traced before has one chunk
    op = {p: ejx.NativeSparseAttention(64, 16, 512, platform=p) for p in ("triton", "xla")}
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 40_000, h, 64), jnp.bfloat16) for key, h in zip(keys, (8, 1, 1)))
    gates = jnp.full((1, 40_000, 8, 3), 0.5)
    out, blocks = op["triton"](q, k, v, gates, return_indices=True)
    saved, _ = jax.vjp(lambda q: op["triton"](q, k, v, gates), q)
    for part, offset in ((slice(64), 0), (slice(-64, None), None)):
        expected = op["xla"](q[:, part], k, v, gates[:, part], block_indices=blocks[:, part], q_offset=offset)
        for found in (out, saved):
            assert_close(found[:, part], np.asarray(expected.astype(jnp.float32)), "bfloat16")
    jax.clear_caches()
