"""The grouped matmul by quantised right sides, on XLA and by its Triton kernels, interpreted: against the reference with their numbers in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.core.workload import launches_of
from ejkernel_eqx.launch import compile_ahead
from ejkernel_eqx.matmul.arguments import resolve, RightSide
from ejkernel_eqx.quantised.quantise import KINDS, quantised_array
from tests import meshes
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, quick
from tests.matmul.cases import Case, exact, make
from tests.meshes import HEADS, ROWS
from tests.tolerances import assert_close

platform = platforms()

FORMS = {
    **{name: KINDS[name] for name in ("int8", "fp8-block", "mxfp4", "nvfp4")},
    "float8 in rows": ejx.QuantFormat("float8_e4m3fn", (1, 128), "bfloat16"),
    "float8 with one scale": ejx.QuantFormat("float8_e5m2", (0, 0), "float16"),
    "int4": ejx.QuantFormat("uint4", (1, 32), "bfloat16"),
    "int4 with zeros": ejx.QuantFormat("uint4", (1, 64), "float16", True),
}
DEFAULTS = ("fp8-block", "nvfp4", "int4 with zeros")
forms = pytest.mark.parametrize(
    "name", [name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
# An empty group, rows past the last one, and columns that are no whole tile.
GATED = Case((1, 0, 3, 2), 7, 160, 20, activation="silu", gated="pair", bias=True, transpose=True)
PLAIN = Case((1, 0, 3, 2), 7, 160, 20, transpose=True)


def weight_of(array: Any, form: ejx.QuantFormat) -> ejx.QuantizedWeight:
    weight = quantised_array(array.astype(jnp.float32), dataclasses.replace(form, zeros=False))
    zeros = None
    if form.zeros:
        zeros = jnp.asarray(np.random.default_rng(1).integers(0, 16, weight.scales.shape), jnp.uint8)
    return ejx.QuantizedWeight(weight.codes, weight.scales, zeros, weight.tensor_scale, form, array.dtype)


def quantised(case: Case, form: ejx.QuantFormat) -> tuple[Any, Any, Any]:
    """Arguments with quantised right sides, the same with their numbers, and a cotangent."""
    given, dout = make(case)
    weights = {name: weight_of(given[name], form) for name in ("rhs", "up") if name in given}
    return given | weights, given | {n: ejx.dequantise(w) for n, w in weights.items()}, dout


def results(operation: ejx.GroupedMatmul, given: Any, dout: Any) -> Any:
    """The output and the gradients of arrays of floats."""
    some = {name: x for name, x in given.items() if name in ("lhs", "bias", "up_bias")}

    @quick
    def run(some, given, dout):
        out, pull = jax.vjp(lambda some: operation(**{**given, **some}), some)
        return {"out": out} | pull(dout)[0]

    return run(some, given, dout)


def agree(found: Any, expected: Any, dtype: Any = None) -> None:
    for name, x in found.items():
        assert_close(x, expected[name], dtype, "forward" if name == "out" else "gradient", name=name)


@forms
def test_every_format(name, platform):
    given, floats, dout = quantised(GATED, FORMS[name])
    agree(results(GATED.operation(platform), given, dout), exact(GATED, floats, dout))


def one_row(form: ejx.QuantFormat) -> Any:
    pytest.importorskip("triton")
    from ejkernel_eqx.matmul.triton.compiled import GroupedTile, TritonConfig

    tile = GroupedTile(16, 16, 16, 4, 2, 2)
    return TritonConfig(GroupedTile(1, 8, 64, 4, 1, 2), tile, tile, "ieee", fast_sigmoid=False)


@forms
def test_tiles_of_one_row(name):
    """Without tensor cores, over a contracted axis that is no whole tile."""
    given, floats, dout = quantised(GATED, FORMS[name])
    operation = GATED.operation(INTERPRET, config=one_row(FORMS[name]))
    agree(results(operation, given, dout), exact(GATED, floats, dout))


CASES = {
    "halves": (
        Case((1, 0, 3), 5, 64, 12, activation="gelu", gated="halves", bias=True, transpose=True),
        "int4",
    ),
    "interleaved": (
        Case(
            (1, 0, 3), 5, 64, 12, "bfloat16", "silu", "interleaved", clipped=True, bias=True, transpose=True
        ),
        "mxfp4",
    ),
    "gathered": (Case((2, 0, 3), 7, 64, 12, gathered=4, transpose=True), "nvfp4"),
    "leading axes": (Case(((1, 0, 3), (0, 2, 1)), 5, 64, 12, transpose=True), "fp8-block"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["default", "one row"])
@pytest.mark.parametrize("name", CASES)
def test_ways_of_a_call(name, way, platform):
    case, form = CASES[name][0], FORMS[CASES[name][1]]
    if way == "one row" and platform == "xla":
        pytest.skip("of kernels")
    given, floats, dout = quantised(case, form)
    options = {"config": one_row(form)} if way == "one row" else {}
    agree(results(case.operation(platform, **options), given, dout), exact(case, floats, dout), case.dtype)


@pytest.mark.slow
def test_rows_of_codes_that_are_no_whole_words():
    """On XLA: kernels refuse them."""
    case, form = Case((1, 3), 5, 10, 12, transpose=True), ejx.QuantFormat("uint4", (1, 0))
    given, floats, dout = quantised(case, form)
    agree(results(case.operation("xla"), given, dout), exact(case, floats, dout))


@pytest.mark.few(1)
def test_a_transposed_weight(platform):
    """`[E, K, N]`, whose codes are those of `[E, N, K]`."""
    given, floats, dout = quantised(PLAIN, FORMS["int4"])
    turned = dataclasses.replace(PLAIN, transpose=False)
    agree(
        results(turned.operation(platform), given | {"rhs": given["rhs"].T}, dout), exact(PLAIN, floats, dout)
    )


@pytest.mark.few(1)
def test_a_group_that_nobody_has_is_not_read(platform):
    given, _, dout = quantised(GATED, FORMS["float8 in rows"])
    clean = results(GATED.operation(platform), given, dout)
    for name in ("rhs", "up"):
        w = given[name]
        spoiled = w.scales.at[1].set(0x7FC0)  # NaN
        given[name] = ejx.QuantizedWeight(w.codes, spoiled, None, None, w.format, w.dtype)
    found = results(GATED.operation(platform), given, dout)
    for name, x in found.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["rows", "weights"])
def test_mapped(mapped, platform):
    given, floats, dout = quantised(PLAIN, FORMS["nvfp4"])
    op, lhs, w, sizes = PLAIN.operation(platform), given["lhs"], given["rhs"], given["group_sizes"]
    other = jax.tree.map(lambda x: x[::-1], w)
    if mapped == "rows":
        found = quick(jax.vmap(lambda lhs: op(lhs, w, sizes)))(jnp.stack([lhs, 2 * lhs]))
        expected = [exact(PLAIN, floats | {"lhs": k * lhs}, dout)["out"] for k in (1, 2)]
    else:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), w, other)
        found = quick(jax.vmap(lambda w: op(lhs, w, sizes)))(stacked)
        expected = [exact(PLAIN, floats | {"rhs": ejx.dequantise(x)}, dout)["out"] for x in (w, other)]
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    given, floats, dout = quantised(GATED, FORMS["int4"])
    op = GATED.operation("xla")
    loss = lambda given: lambda lhs: (jnp.sin(op(**{**given, "lhs": lhs})) * dout).sum()
    product = lambda given: quick(lambda x: jax.jvp(jax.grad(loss(given)), (x,), (x,))[1])(given["lhs"])
    assert_close(product(given), product(floats), kind="gradient")


def test_many_rows_are_multiplied_by_floats():
    """From 64 rows a group on the call is one of floats."""
    given, floats, _ = quantised(dataclasses.replace(PLAIN, sizes=(100, 0, 60, 96), M=256), FORMS["int4"])
    op = PLAIN.operation("xla")
    np.testing.assert_array_equal(
        quick(lambda given: op(**given))(given), quick(lambda given: op(**given))(floats)
    )
    few = {"lhs": given["lhs"][:255], "group_sizes": jnp.array([99, 0, 60, 96])}
    formats = []
    for some in (given, given | few):
        (choice,) = ejx.explain(lambda some: op(**some), some).choices
        formats.append("uint4" in choice.key)
    assert formats == [False, True]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["explicit without context", "automatic"])
@pytest.mark.parametrize("name", ["int4", "fp8-block"])
def test_on_a_mesh(name, kind, platform):
    """Columns are split with their scales, unless they share them with others."""
    case = dataclasses.replace(PLAIN, sizes=((3, 0, 2, 1), (0, 5, 0, 2)))
    given, floats, dout = quantised(case, FORMS[name])
    mesh = meshes.mesh_of(kind)
    lie = {"lhs": (ROWS,), "group_sizes": (ROWS,), "rhs": ()}
    columns = meshes.spec("both", None, HEADS)
    place = lambda x, spec: meshes.place(mesh, (x,), (spec,))[0]
    placed = {n: place(x, meshes.spec("both", *lie[n])) for n, x in given.items() if n != "rhs"}
    split = lambda x: columns if name == "int4" or x.shape[-2] == case.N else meshes.spec("both")
    w = jax.tree.map(lambda x: place(x, split(x)), given["rhs"])
    op = case.operation(platform)
    with meshes.context(kind, mesh):
        found = jax.jit(lambda given: op(**given))(placed | {"rhs": w})
    assert_close(np.asarray(found), exact(case, floats, dout)["out"])


def _call(weight: Any, up: Any = None, op: Any = None, **more: Any) -> Any:
    op = op or PLAIN.operation("xla")
    return op(jnp.ones((7, 160)), weight, jnp.array([1, 0, 3, 2]), up=up, **more)


def _weight(name: str, *shape: int) -> ejx.QuantizedWeight:
    return weight_of(jnp.ones(shape or (4, 20, 160)), FORMS[name])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (r"rhs_scale: expected None, as QuantizedWeight", lambda: _call(_weight("int8"), rhs_scale=jnp.ones((4, 20)))),
        (r"rhs: expected a weight \[out, in\] of which `in` is K", lambda: _call(_weight("int8", 4, 160, 32).T)),
        (r"rhs: expected \[E, N, K\] with K = 160", lambda: _call(_weight("int8", 4, 20, 96))),
        (r"rhs: expected \[E, N, K\] with K = 160", lambda: _call(_weight("int8", 20, 160))),
        (r"up: expected a right side stored as rhs, int8", lambda: _call(_weight("int8"), _weight("int4"), GATED.operation("xla"))),
        (r"up: expected a right side stored as rhs, int8", lambda: _call(_weight("int8"), jnp.ones((4, 20, 160)), GATED.operation("xla"))),
    ],
)  # fmt: skip
def test_wrong_right_sides(words, call):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("for one row of the forward with a quantised", None),
        ("runs of 32 columns", ejx.QuantFormat("uint4", (1, 8))),
    ],
)
def test_tiles_of_one_row_that_are_refused(words, form):
    weight = jnp.ones((4, 20, 160)) if form is None else weight_of(jnp.ones((4, 20, 160)), form)
    config = one_row(FORMS["int4"])
    with pytest.raises(ValueError, match=words):
        _call(weight, op=PLAIN.operation(INTERPRET, config=config))


def test_blocks_that_kernels_do_not_take():
    pytest.importorskip("triton")
    form = ejx.QuantFormat("int8", (1, 80))
    with pytest.raises(ejx.UnsupportedError, match="blocks of a power of two of columns, not 80"):
        _call(weight_of(jnp.ones((4, 20, 160)), form), op=PLAIN.operation(INTERPRET))
    words = weight_of(jnp.ones((4, 20, 160)), ejx.QuantFormat("uint4", (1, 4)))
    with pytest.raises(ejx.UnsupportedError, match="words of 8 codes, not K = 160 in blocks of 4"):
        _call(words, op=PLAIN.operation(INTERPRET))
    pallas = PLAIN.operation("pallas-interpret")
    with pytest.raises(ejx.UnsupportedError, match="not int8 in blocks"):
        _call(weight_of(jnp.ones((4, 20, 160)), form), op=pallas)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", FORMS)
def test_tiles_of_one_row_fit(name, target):
    """By NVIDIA's instructions, too, which the interpreter does not know."""
    pytest.importorskip("triton")
    from ejkernel_eqx.matmul.triton import compiled

    case = dataclasses.replace(GATED, M=4, sizes=(1, 0, 2, 1), K=2048, dtype="bfloat16")
    given, *_ = quantised(case, FORMS[name])
    sides = RightSide(given["rhs"], given["bias"], None), RightSide(given["up"], given["up_bias"], None)
    arrays, spec = resolve(
        given["lhs"][None], *sides, given["group_sizes"][None], None, case.operation("xla").spec, None
    )
    config = one_row(FORMS[name])
    tile = dataclasses.replace(config.forward, block_k=8192 // FORMS[name].bits, num_warps=2)
    config = dataclasses.replace(config, forward=tile, fast_sigmoid=target == "sm_90")
    run = lambda arrays, config: compiled.forward(arrays, spec, config)
    (launch,) = launches_of(run, lambda seed: arrays, config)
    report = compile_ahead(launch, target)
    assert report.fits and report.spills == 0, report
