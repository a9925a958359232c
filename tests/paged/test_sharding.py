"""Attention over pages on a mesh: rows and heads stay where they are, on the platform the compiler sees into and on those it does not."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import with_plan
from tests.paged.cases import reference
from tests.paged.writes import scatter
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

ROWS, H, K, D, PAGES, SIZE = 4, 4, 2, 8, 7, 3
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
NEW = (1, 7)  # queries of each sequence
SIZES: dict[str, Any] = {"query_start_loc": jnp.asarray([0, 1, 8], jnp.int32), "max_query_len": 7}


def _forward(arrays, spec, config):
    assert arrays.q.ndim == 4
    results = reference.attend(arrays, spec)
    return {"out": results["out"].astype(arrays.q.dtype), "lse": results["lse"]}


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
XLA = ejx.kernel_registry.get("paged_attention", "xla")
HOOKS = {name: getattr(XLA.load(), name) for name in ("default_config", "unsupported", "config_type")}
OPAQUE = types.SimpleNamespace(OPAQUE=True, forward=_forward, write=scatter, **HOOKS)


def opaque(module: Any) -> Any:
    given = dict(operation=module.operation, platform=ejx.Platform.PALLAS, target=OPAQUE, workload=None)
    snapshot = dataclasses.replace(module.plan.snapshot, implementations=(dataclasses.replace(XLA, **given),))
    return with_plan(module, dataclasses.replace(module.plan, snapshot=snapshot))


BUILD = {"xla": lambda module: module, "opaque": opaque}
modes = pytest.mark.parametrize(
    "build, kind",
    [
        pytest.param(build, kind, marks=pytest.mark.slow if kind == "explicit" else ())
        for build in BUILD
        for kind in KINDS
    ],
)


def sent(compiled) -> list[str]:
    """The types of what is sent; but for single numbers, such as where a loop over all rows ends."""
    found = COLLECTIVE.findall(compiled.as_text() or "")
    return [shape for shape, _ in found if not re.match(r"\w+\[\]", shape)]


def mesh_of(kind: str) -> Any:
    return jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(KINDS[kind],) * 2)


def place(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def problem(lead: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """Queries, and a bound cache whose pages have the axes `lead` in front."""
    random, count = np.random.default_rng(0), sum(NEW)
    table = np.stack([random.permutation(PAGES)[:6].reshape(2, 3) for _ in range(ROWS)])
    lengths = jnp.asarray(random.integers(7, 10, (ROWS, 2)), jnp.int32)
    cache = ejx.PagedKVCache.init(PAGES, SIZE, K, D, batch_shape=lead, dtype=dtype)
    room = jnp.arange(PAGES * SIZE)
    cache = cache.append(draw(1, *lead, len(room), K, D), draw(2, *lead, len(room), K, D), room)
    return draw(3, ROWS, count, H, D), cache.bind(table, lengths)


def over(mesh, cache, pages: tuple[Any, ...], rows: Any):
    """The cache with its pages and tables where they belong."""
    arrays = {
        name: place(mesh, x, *pages[: x.ndim])
        for name in ("k", "v", "k_scale", "v_scale")
        if (x := getattr(cache, name)) is not None
    }
    tables = {name: place(mesh, getattr(cache, name), rows) for name in ("page_table", "lengths")}
    return dataclasses.replace(cache, **arrays, **tables)


PLACES = {
    "rows and heads, pages of all": ((), ("dp", None, "tp"), (None, None, "tp")),
    "rows and heads, pages of each": ((ROWS,), ("dp", None, "tp"), ("dp", None, None, "tp")),
}


@pytest.mark.few(1)
@modes
@pytest.mark.parametrize("where", PLACES)
def test_a_call_is_split_where_it_stands(where, build, kind):
    """Pages are never sent, and nothing is where types say where everything belongs, or pages do."""
    lead, queries, pages = PLACES[where]
    q, cache = problem(lead)
    module = BUILD[build](ejx.RaggedPagedAttention(4, softmax_scale=0.3))
    call = functools.partial(module, **SIZES, return_lse=True)
    run = lambda q, cache, sinks: call(q, cache, sinks=sinks)
    sinks = draw(5, H)
    expected = quick(run)(q, cache, sinks)
    mesh = mesh_of(kind)
    given = place(mesh, q, *queries), over(mesh, cache, pages, "dp"), place(mesh, sinks)
    with jax.set_mesh(mesh):
        compiled = quick(run).lower(*given).compile()
        results = compiled(*given)
    for got, want in zip(results, expected, strict=True):
        assert_close(got, want)
    if lead or kind == "explicit":
        assert not sent(compiled)
        assert results[0].sharding.is_equivalent_to(given[0].sharding, q.ndim)
    assert not any(shape.startswith(f"f32[{PAGES},{SIZE}") for shape in sent(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("build, kind", [("xla", "explicit"), ("opaque", "auto"), ("opaque", "explicit")])
def test_what_is_written_stays_where_it_is(build, kind):
    """8-bit pages by heads, and rows with pages of their own by `vmap`: written, read and kept where they are."""
    module = BUILD[build](ejx.RaggedPagedAttention(append=True))
    q, cache = problem((ROWS,), jnp.int8)
    k, v = draw(6, ROWS, q.shape[1], K, D), draw(7, ROWS, q.shape[1], K, D)
    row = jnp.arange(ROWS * 2, dtype=jnp.int32).reshape(ROWS, 2, 1)
    table = jnp.concatenate([jnp.mod(row, 2), 2 + jnp.mod(row, 2), 4 + jnp.mod(row, 2)], -1)
    cache = dataclasses.replace(cache, page_table=table)  # no page of two sequences
    pairs = jnp.asarray([1, 0]), jnp.asarray([0, -1])  # a page that is copied before, and one that is not

    def call(q: Any, cache: Any, k: Any, v: Any) -> Any:
        return module(q, cache.copy_pages(*pairs), k, v, **SIZES)

    take = lambda tree: jax.tree.map(lambda x: x[0], tree)
    for lead in ((), ("dp",)):
        run = jax.vmap(call) if lead else call
        arrays = (q, cache, k, v) if lead else take((q, cache, k, v))
        expected = quick(run)(*arrays)
        mesh = mesh_of(kind)
        pages = (*lead, None, None, "tp")
        heads = (*lead, None, "tp")
        given = [place(mesh, x, *heads) for x in (arrays[0], *arrays[2:])]
        given.insert(1, over(mesh, arrays[1], pages, *(lead or (None,))))
        with jax.set_mesh(mesh):
            compiled = quick(run).lower(*given).compile()
            out, new = compiled(*given)
        assert_close(out, expected[0])
        assert not sent(compiled)
        for name in ("k", "v"):
            got, want = getattr(new, name), getattr(expected[1], name)
            assert np.abs(np.asarray(got, np.int32) - np.asarray(want, np.int32)).max() <= 1
            assert got.sharding.is_equivalent_to(getattr(given[1], name).sharding, got.ndim)


@pytest.mark.few(1)
@pytest.mark.parametrize("build, kind", [("xla", "auto"), ("opaque", "auto"), ("opaque", "explicit")])
@pytest.mark.parametrize("operation", ["decode", "dense", "unified"])
def test_other_operations(operation, build, kind):
    """The rows of one decode each, of dense keys, and with slopes of heads and a bias of all."""
    q, cache = problem((ROWS,))
    heads, own = ("dp", None, "tp"), ("dp", None, None, "tp")
    mesh = mesh_of(kind)
    if operation == "dense":
        keys = draw(8, ROWS, 9, K, D), draw(9, ROWS, 9, K, D)
        ends = jnp.array([9, 3, 1, 0])
        module, arrays = ejx.RaggedDecodeAttention(), (q[:, 0], *keys, jnp.zeros(ROWS, jnp.int32), ends)
        given = place(mesh, arrays[0], "dp", "tp"), *(place(mesh, x, *heads) for x in keys)
        given += tuple(place(mesh, x, "dp") for x in arrays[3:])
        run = lambda module: lambda *arrays: module(*arrays)
    elif operation == "decode":
        module, arrays = ejx.PagedAttention(), (q[:, :2], cache)
        given = place(mesh, q[:, :2], *heads), over(mesh, cache, own, "dp")
        run = lambda module: lambda *arrays: module(*arrays)
    else:
        slopes, bias = jnp.abs(draw(10, H)), draw(11, 7, 7)
        module, arrays = ejx.UnifiedAttention(), (q, cache, slopes, bias)
        given = (
            place(mesh, q, *heads),
            over(mesh, cache, own, "dp"),
            place(mesh, slopes, "tp"),
            place(mesh, bias),
        )
        run = lambda module: (
            lambda q, cache, slopes, bias: module(q, cache, **SIZES, alibi_slopes=slopes, qq_bias=bias)
        )
    run = run(BUILD[build](module))
    expected = quick(run)(*arrays)
    with jax.set_mesh(mesh):
        compiled = quick(run).lower(*given).compile()
        out = compiled(*given)
    assert_close(out, expected)
    assert not sent(compiled)
