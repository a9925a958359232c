"""The grouped matmul on XLA and by its Triton kernels, interpreted: against the reference, and how it composes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.matmul import xla_loops
from tests.agreement import assert_agrees, platforms
from tests.attention.dense import INTERPRET, quick
from tests.matmul.cases import Case, CASES, exact, formula, learned, make, reference_of, results
from tests.tolerances import assert_close

platform = platforms()


# By default every way to gate, biases of both right sides, stored, gathered and transposed right sides, and leading axes.
DEFAULTS = ("SwiGLU", "GPT-OSS", "float8", "gathered, gated", "leading axes", "SwiGLU in halves")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULTS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    given, dout = make(case)
    found = results(case, case.operation(platform), given, dout)
    assert found["out"].dtype == (case.out or case.dtype)
    assert all(
        found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in learned(case, given).items()
    )
    assert_agrees(case, found, exact(case, given, dout))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name):
    case = CASES[name]
    given, dout = make(case)
    np.testing.assert_allclose(exact(case, given, dout)["out"], formula(case, given), rtol=1e-12, atol=1e-14)


GATED = Case(sizes=(3, 0, 5), M=12, activation="silu", gated="pair", clipped=True, bias=True)
GATHERED = Case(sizes=(3, 0, 5), M=12, gathered=6, bias=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [GATED, GATHERED], ids=["gated", "gathered"])
def test_nan_outside_of_groups_reaches_nothing(case, platform):
    """In rows past the last group, in their cotangents, and at indices that nobody reads."""
    given, dout = make(case)
    clean = results(case, case.operation(platform), given, dout.at[8:].set(0))
    if case.gathered is None:
        given["lhs"] = given["lhs"].at[8:].set(jnp.nan)
    else:
        given["row_indices"] = given["row_indices"].at[8:].set(jnp.array([-5, 10**9, 6, 0]))
    found = results(case, case.operation(platform), given, dout.at[8:].set(jnp.nan))
    assert not found["out"][8:].any()
    assert case.gathered is not None or not found["lhs"][8:].any()
    for name, x in found.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


@pytest.mark.parametrize("limit", [1.5, 1.53])
def test_what_rounds_to_the_limit_keeps_its_side(limit, platform):
    """Products a little below and above the limit, which are the same number in bfloat16: the gradient of those above is zero."""
    near = np.array([[1 - 1e-3, 1 + 1e-3, -1 + 1e-3, -1 - 1e-3]] * 4, np.float32) * limit
    # The sum of two columns, so that the products are no numbers of bfloat16.
    high = jnp.asarray(near, jnp.bfloat16)
    right = jnp.stack([high, jnp.asarray(near - np.asarray(high, np.float32), jnp.bfloat16)])[:, 0]  # [2, 4]
    op = ejx.GroupedMatmul("silu", limit=limit, up_shift=1.0, platform=platform)
    lhs, sizes = jnp.ones((1, 2), jnp.bfloat16), jnp.array([1])
    call = lambda gate, up: op(lhs, gate[None], sizes, up=up[None])
    dgate, dup = quick(jax.vjp(call, right, right)[1])(jnp.ones((1, 4), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(dgate[0]) != 0, [True, False, True, True])
    np.testing.assert_array_equal(np.asarray(dup[0]) != 0, [True, False, True, False])


@pytest.mark.few(1)
def test_a_group_that_nobody_has_is_not_read(platform):
    case = dataclasses.replace(GATED, clipped=False)
    given, dout = make(case)
    clean = results(case, case.operation(platform), given, dout)
    given = given | {name: given[name].at[1].set(jnp.nan) for name in ("rhs", "up", "bias", "up_bias")}
    found = results(case, case.operation(platform), given, dout)
    for name, x in found.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    assert not found["rhs"][1].any() and not found["bias"][1].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [GATED, GATHERED], ids=["gated", "gathered"])
@pytest.mark.parametrize("over", ["rows", "right sides", "all"])
def test_mapped(case, over, platform):
    """`vmap` of some arguments or all, and gradients of each example."""
    one, two = make(case, 1), make(dataclasses.replace(case, sizes=(0, 7, 2)), 2)
    shared = {
        "rows": ("rhs", "up", "bias", "up_bias"),
        "right sides": ("lhs", "group_sizes", "row_indices"),
        "all": (),
    }[over]
    pick = lambda example: {n: one[0][n] if n in shared else x for n, x in example[0].items()}
    examples = [(pick(one), one[1]), (pick(two), two[1])]
    op = case.operation(platform)
    expected = [results(case, op, *example) for example in examples]
    axes = {name: None if name in shared else 0 for name in one[0]}
    given = {n: one[0][n] if n in shared else jnp.stack([g[n] for g, _ in examples]) for n in one[0]}
    douts = jnp.stack([dout for _, dout in examples])
    each = lambda given, dout: results(case, op, given, dout)
    found = quick(jax.vmap(each, in_axes=(axes, 0)))(given, douts)
    for name, x in found.items():
        for i in range(2):
            assert_close(x[i], expected[i][name], kind="gradient", name=name)
    # The gradient of an argument that all examples share is their sum.
    call = lambda some: jax.vmap(lambda given: op(**given), in_axes=(axes,))({**given, **some})
    summed = quick(lambda some: jax.vjp(call, some)[1](douts)[0])(learned(case, given))
    for name, x in summed.items():
        total = expected[0][name] + expected[1][name]
        assert_close(x if name in shared else x.sum(0), total, kind="gradient", name=name)


@pytest.mark.few(1)
def test_composes(platform):
    """jit, scan over layers, remat, sizes that are known only when the program runs."""
    case = Case(sizes=(3, 0, 5), M=9, K=6, N=6, activation="silu")
    given, dout = make(case)
    op, weights = case.operation(platform), jnp.stack([given["rhs"], -given["rhs"]])

    def layers(x, weights, sizes):
        step = lambda x, w: (jax.checkpoint(op)(x, w, sizes), None)
        return (jax.lax.scan(step, x, weights)[0] * dout).sum()

    written_out = lambda x, weights, sizes: (op(op(x, weights[0], sizes), weights[1], sizes) * dout).sum()
    for sizes in (given["group_sizes"], jnp.array([0, 9, 0])):
        found = quick(jax.grad(layers, (0, 1)))(given["lhs"], weights, sizes)
        expected = quick(jax.grad(written_out, (0, 1)))(given["lhs"], weights, sizes)
        for x, y in zip(found, expected):
            assert_close(x, y, kind="gradient")


@pytest.mark.parametrize(
    "case",
    [
        Case(M=10),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (GATED, GATHERED, Case(sizes=((3, 0), (1, 4)), M=6, transpose=True))
        ),
    ],
    ids=["plain", "gated", "gathered", "leading axes"],
)
def test_forward_mode_and_second_derivatives(case):
    """On XLA: a product of the Hessian of all arguments and a vector, by the reference in float64."""
    arguments, dout = make(case)
    op, some = case.operation("xla"), learned(case, arguments)

    def loss(some):
        return (jnp.sin(op(**{**arguments, **some})) * dout).sum()

    def wanted(some):
        return (jnp.sin(reference_of(case, {**arguments, **some})) * dout.astype(jnp.float64)).sum()

    found = quick(lambda some: jax.jvp(jax.grad(loss), (some,), (some,))[1])(some)
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.float64) for name, x in some.items()}
        expected = quick(lambda some: jax.jvp(jax.grad(wanted), (some,), (some,))[1])(wide)
    for name, x in found.items():
        assert_close(x, expected[name], kind="gradient", name=name)


def test_forward_mode_is_refused_by_triton():
    pytest.importorskip("triton")
    given, _ = make(GATED)
    op = GATED.operation(INTERPRET)
    with pytest.raises(ejx.UnsupportedError, match="platform='xla'"):
        jax.jvp(lambda lhs: op(**{**given, "lhs": lhs}), (given["lhs"],), (given["lhs"],))


@pytest.mark.few(1)
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_stored_right_sides_are_constants(stored):
    case = Case(stored=stored, M=9)
    given, _ = make(case)
    loss = lambda some: case.operation("xla")(**{**given, **some}).sum()
    with pytest.raises(ejx.UnsupportedError, match=r"rhs_scale.*constants"):
        jax.grad(loss)({"rhs_scale": given["rhs_scale"]})
    stopped = lambda scale: loss({"rhs_scale": jax.lax.stop_gradient(scale)})
    assert not jax.grad(stopped)(given["rhs_scale"]).any()
    assert jax.grad(lambda lhs: loss({"lhs": lhs}))(given["lhs"]).any()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", [Case(M=9), Case(M=9, transpose=True, gathered=5)], ids=["plain", "gathered"]
)
def test_ragged_dot_on_a_tpu(case):
    """Lowered for a TPU the products are JAX's own, and give the same."""
    arguments, dout = make(case)
    op = case.operation("xla")

    def everything(given, dout):
        return jax.vjp(lambda some: op(**{**given, **some}), learned(case, given))[1](dout)

    lowered = jax.jit(everything).trace(arguments, dout).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("ragged_dot") >= 2
    x, w, y = arguments["lhs"], arguments["rhs"], dout.at[8].set(jnp.nan)
    sizes, index = arguments["group_sizes"].at[3].set(0), arguments.get("row_indices")
    form = xla_loops.Form("float32", "float32", case.transpose, 8)
    for ours, theirs, other in (
        (xla_loops.rows, xla_loops.rows_on_tpu, w),
        (xla_loops.groups, xla_loops.groups_on_tpu, y),
    ):
        assert_close(theirs(x, other, sizes, index, form), ours(x, other, sizes, index, form))


def test_what_an_empty_call_gives(platform):
    op = ejx.GroupedMatmul(platform=platform)
    x, w, sizes = jnp.ones((0, 4)), jnp.ones((2, 4, 3)), jnp.zeros(2, jnp.int32)
    assert op(x, w, sizes).shape == (0, 3)
    assert not jax.grad(lambda w: op(x, w, sizes).sum())(w).any()
    assert op(jnp.ones((5, 4)), jnp.ones((0, 4, 3)), jnp.zeros(0, jnp.int32)).shape == (5, 3)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_sums_of_nothing_are_the_bias(platform, transpose_rhs):
    op: Any = ejx.GroupedMatmul(platform=platform, transpose_rhs=transpose_rhs, activation="relu")
    x, w = jnp.ones((5, 0)), jnp.ones((2, 3, 0) if transpose_rhs else (2, 0, 3))
    sizes, bias = jnp.array([3, 1]), jnp.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    expected = jnp.maximum(jnp.concatenate([bias[jnp.array([0, 0, 0, 1])], jnp.zeros((1, 3))]), 0.0)
    assert jnp.array_equal(op(x, w, sizes, bias), expected) and not op(x, w, sizes).any()
    dx, dw, dbias = jax.grad(lambda *given: op(*given[:2], sizes, given[2]).sum(), (0, 1, 2))(x, w, bias)
    assert dx.shape == x.shape and dw.shape == w.shape
    assert jnp.array_equal(dbias, jnp.array([[3.0, 0.0, 3.0], [1.0, 1.0, 0.0]]))


@pytest.mark.slow
def test_float64(enable_x64):
    case = Case(dtype="float64", bias=True, activation="silu", gathered=5)
    given, dout = make(case)
    assert_agrees(case, results(case, case.operation("xla"), given, dout), exact(case, given, dout))
    with pytest.raises(ejx.UnsupportedError, match="not float64"):
        case.operation(INTERPRET)(**given)


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [1, 17, 128, 130])
@pytest.mark.parametrize("inner", [1, 17, 128, 130])
def test_tails_of_the_largest_tiles(inner, columns):
    pytest.importorskip("triton")
    from ejkernel_eqx.matmul.triton.compiled import GroupedTile, TritonConfig

    case = Case(
        sizes=(20, 0, 9, 1), M=33, K=inner, N=columns, gated="interleaved", activation="relu", bias=True
    )
    given, dout = make(case)
    tile, right = GroupedTile(16, 256, 128, 8, 2), GroupedTile(32, 256, 128, 8, 2)
    op = ejx.GroupedMatmul(
        **case.options, config=TritonConfig(tile, tile, right, "ieee", False), platform=INTERPRET
    )
    assert_agrees(case, results(case, op, given, dout), exact(case, given, dout))


def test_indices_past_the_last_group_are_anything():
    """Also known ones among traced arrays, of which only those that count are checked."""
    x, w = jnp.arange(12.0).reshape(3, 4), jnp.ones((2, 4, 3))
    rows, op = np.array([2, 0, 1, -7, 99]), ejx.GroupedMatmul(platform="xla")
    expected = op(x, w, [1, 2], row_indices=[2, 0, 1, 0, 0])
    calls = [
        lambda x, sizes: op(x, w, [1, 2], row_indices=rows),
        lambda x, sizes: op(x, w, sizes, row_indices=rows),
    ]
    for call in calls:
        np.testing.assert_array_equal(quick(call)(x, jnp.array([1, 2])), expected)
    with pytest.raises(
        ValueError, match=r"row_indices: expected numbers from 0 to 2, received \[ ?2 +0 +1 +-7 +0\]"
    ):
        quick(lambda x: op(x, w, [1, 3], row_indices=rows))(x)


def test_options_may_be_numbers_of_numpy(unchecked):
    options: Any = dict(alpha=np.float32(1.5), limit=np.float64(7), transpose_rhs=np.bool_(True))
    given = ejx.GroupedMatmul("silu", **options)
    assert given.spec == ejx.GroupedMatmul("silu", alpha=1.5, limit=7, transpose_rhs=True).spec


GATED_HALVES = dict(gate_up="halves")
WRONG: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    # options, arguments that are others than those of the test, words of the message
    ({}, dict(lhs=jnp.ones(4)), ["lhs", "rank 2"]),
    ({}, dict(lhs=jnp.ones((5, 3))), ["rhs", "K = 3", "(2, 4, 6)", "transpose_rhs=True"]),
    ({}, dict(rhs=jnp.ones((2, 4, 6), jnp.bfloat16)), ["rhs", "float32", "bfloat16", "cast"]),
    ({}, dict(rhs=jnp.ones((4, 6))), ["rhs", "rank 3"]),
    ({}, dict(rhs=jnp.ones((2, 4, 6), jnp.int8)), ["rhs_scale", "int8", "None"]),
    ({}, dict(rhs_scale=jnp.ones((2, 6))), ["rhs_scale", "expected None", "float32"]),
    ({}, dict(group_sizes=jnp.array([1, 2, 3])), ["group_sizes", "(2,)", "(3,)"]),
    ({}, dict(group_sizes=jnp.array([1.0, 2.0])), ["group_sizes", "integers", "float32"]),
    ({}, dict(group_sizes=jnp.array([3, 3])), ["group_sizes", "at most 5", "3 3"]),
    ({}, dict(group_sizes=jnp.array([-1, 3])), ["group_sizes", "from 0", "-1"]),
    ({}, dict(bias=jnp.ones((2, 5))), ["bias", "[2, 6]", "(2, 5)"]),
    ({}, dict(up=jnp.ones((2, 4, 5))), ["up", "(2, 4, 6)", "(2, 4, 5)"]),
    ({}, dict(up_bias=jnp.ones((2, 6))), ["up_bias", "second right side"]),
    ({}, dict(up_scale=jnp.ones((2, 6))), ["up_scale", "second right side"]),
    ({}, dict(row_indices=jnp.ones((1, 3), jnp.int32)), ["row_indices", "[M]", "(1, 3)"]),
    ({}, dict(row_indices=jnp.array([0, 5, 1])), ["row_indices", "0 to 4"]),
    (dict(activation="tanh"), {}, ["activation", "'tanh'"]),
    (dict(gate_up="pair"), {}, ["gate_up", "'pair'"]),
    (dict(alpha=2.0), {}, ["alpha", "silu"]),
    (dict(limit=0), {}, ["limit", "0"]),
    (dict(up_shift=float("nan")), {}, ["up_shift", "nan"]),
    (dict(preferred_element_type="int32"), {}, ["preferred_element_type", "int32"]),
    (dict(transpose_rhs="no"), {}, ["transpose_rhs", "True or False", "'no'"]),
    (dict(limit=1.0), {}, ["limit", "without gate"]),
    (dict(up_shift=1.0), {}, ["up_shift", "without gate"]),
    (GATED_HALVES, dict(up=jnp.ones((2, 4, 6))), ["up", "gate_up='halves'"]),
    (GATED_HALVES, dict(rhs=jnp.ones((2, 4, 5))), ["rhs", "even", "(2, 4, 5)"]),
]


@pytest.mark.parametrize("options, change, words", WRONG)
def test_wrong_options_and_arguments(options, change, words, unchecked):
    arguments = dict(lhs=jnp.ones((5, 4)), rhs=jnp.ones((2, 4, 6)), group_sizes=jnp.array([1, 2]))
    with pytest.raises(ValueError) as caught:
        ejx.GroupedMatmul(**options)(**(arguments | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.slow
def test_wrong_sizes_are_found_while_the_program_runs():
    call = jax.jit(
        lambda sizes: ejx.grouped_matmul(jnp.ones((5, 4)), jnp.ones((2, 4, 3)), sizes, platform="xla")
    )
    with ejx.check_values(), pytest.raises(Exception, match="group_sizes: expected"):
        jax.block_until_ready(call(jnp.array([4, 4])))


@pytest.mark.parametrize(
    "sizes",
    [(64,) * 8, pytest.param((0, 512, 0, 0, 0, 0, 0, 0), marks=pytest.mark.slow)],
    ids=["even", "one has all"],
)
@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("SwiGLU", "gathered"))]
)
def test_nothing_is_densified(name, sizes, optimised):
    """Temporary memory of value and gradient on XLA, against inputs and outputs."""
    case = dataclasses.replace(
        CASES[name], M=512, K=64, N=224, bias=False, gathered=CASES[name].gathered and 256
    )
    arguments, dout = make(dataclasses.replace(case, sizes=sizes))
    op = case.operation("xla")
    forward = jax.jit(lambda given: op(**given))

    def both(given, dout):
        out, pull = jax.vjp(lambda some: op(**{**given, **some}), learned(case, given))
        return out, pull(dout)[0]

    for program in (forward.lower(arguments), jax.jit(both).lower(arguments, dout)):
        memory = optimised(program).memory_analysis()
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert memory.temp_size_in_bytes < 2 * moved, (memory.temp_size_in_bytes / moved, memory)
