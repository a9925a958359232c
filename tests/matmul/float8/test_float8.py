"""The float8 product on XLA and by its Triton kernels, interpreted: against NumPy in float64 on the quantised operands, and how it composes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import from_dict, to_dict
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable
from ejkernel_eqx.launch.by_name import executing
from ejkernel_eqx.matmul.float8.core import SCALED
from ejkernel_eqx.matmul.float8.spec import ScaledArrays, ScaledSpec
from ejkernel_eqx.matmul.float8.workload import example_problem
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, quick
from tests.compiled import DEVICES
from tests.matmul.float8.cases import (
    as_numbers,
    by_group,
    CASES,
    exact,
    GROUPS,
    quantised_weight,
    rows,
    stacked,
    weight_numbers,
)
from tests.tolerances import assert_close
from tests.workloads import assert_agrees, launches, refusals

platform = platforms()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_formula(name, platform):
    """Also the gradient, which is that of a product without rounding."""
    shape, n, block, scale, dtype, x_scale, out_dtype = CASES[name]
    x, w = rows(*shape, dtype=dtype), quantised_weight(n, shape[-1], block, scale)
    op = ejx.ScaledMatmul(preferred_element_type=out_dtype, platform=platform)
    out, pull = quick(lambda x: jax.vjp(lambda x: op(x, w, x_scale=x_scale), x))(x)
    assert out.dtype == (out_dtype or dtype)
    assert_close(out, exact(x, w, x_scale), dtype if out_dtype in (None, "float32") else out_dtype)
    dout = rows(*out.shape, dtype=out.dtype.name, seed=2)
    (dx,) = quick(pull)(dout)
    assert dx.dtype == x.dtype
    assert_close(dx, np.asarray(dout, np.float64) @ weight_numbers(w), dtype, "gradient")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", GROUPS)
def test_groups_agree_with_the_formula(name, platform):
    """Rows past the last group are 0, even of NaN, and so are their gradients."""
    shape, n, block, sizes, x_scale = GROUPS[name]
    w, each = stacked(n, shape[-1], block, np.shape(sizes)[-1])
    sizes, matrices = jnp.array(sizes), [weight_numbers(one) for one in each]
    real = jnp.asarray(np.arange(shape[-2]) < np.sum(np.asarray(sizes), -1, keepdims=True))[..., None]
    x, op = rows(*shape), ejx.ScaledMatmul(platform=platform)
    out, pull = quick(lambda x: jax.vjp(lambda x: op(x, w, sizes, x_scale=x_scale), x))(
        jnp.where(real, x, jnp.nan)
    )
    wanted = by_group(as_numbers(x, x_scale), [matrix.T for matrix in matrices], sizes)
    assert_close(out, wanted, "float32")
    dout = rows(*out.shape, seed=2)
    (dx,) = quick(pull)(dout)
    assert_close(dx, by_group(np.asarray(dout, np.float64), matrices, sizes), "float32", "gradient")


def test_groups_compose(platform):
    """vmap of rows and sizes, and of weights."""
    shape, n, block, sizes, _ = GROUPS["batches, channels"]
    x, sizes, (w, _) = rows(*shape), jnp.array(sizes), stacked(n, shape[-1], block, 3)
    op = ejx.ScaledMatmul(platform=platform)
    wanted = quick(op)(x, w, sizes)
    assert_close(quick(jax.vmap(op, (0, None, 0)))(x, w, sizes), wanted)
    pair = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), w)
    both = quick(jax.vmap(op))(x, pair, sizes)
    assert_close(both[0], wanted[0])
    assert_close(both[1], quick(op)(x[1], jax.tree.map(lambda a: a[::-1], w), sizes[1]))


def test_zeros_large_numbers_and_nan(platform):
    w = quantised_weight(40, 256)
    x = rows(6, 256)
    x = x.at[0].set(0).at[1, :128].set(0).at[2].multiply(1e35).at[3].multiply(1e-30)
    op = quick(ejx.ScaledMatmul(platform=platform))
    out = np.asarray(op(x, w))
    assert not out[0].any()
    for row in range(1, 6):
        assert_close(out[row], exact(x, w)[row], "float32")
    bad = np.asarray(op(x.at[4, 7].set(jnp.nan).at[5, 200].set(jnp.inf), w))
    assert np.isnan(bad[4:]).all()
    np.testing.assert_array_equal(bad[:4], out[:4])
    # By one scale, numbers out of range are clipped.
    fixed = quick(lambda x: ejx.ScaledMatmul(platform=platform)(x, w, x_scale=0.5))
    assert_close(fixed(x[2:3]), exact(np.clip(x[2:3], -224, 224), w, 0.5), "float32")
    assert np.isnan(np.asarray(fixed(x.at[4, 7].set(jnp.nan)))[4]).all()


def test_composes(platform):
    """vmap of rows, of weights and of scales, in a scan."""
    x, w, other = rows(3, 4, 256), quantised_weight(32, 256), quantised_weight(32, 256, seed=5)
    op = ejx.ScaledMatmul(platform=platform)
    wanted = quick(op)(x, w)
    assert_close(quick(jax.vmap(op, (0, None)))(x, w), wanted)
    pair = jax.tree.map(lambda a, b: jnp.stack([a, b]), w, other)
    both = quick(jax.vmap(op, (None, 0)))(x, pair)
    assert_close(both[0], wanted)
    assert_close(both[1], exact(x, other), "float32")
    grads = quick(jax.vmap(jax.grad(lambda x, w: op(x, w).sum()), (None, 0)))(x, pair)
    assert_close(grads[1, 0, 0], weight_numbers(other).sum(0), "float32", "gradient")
    scales = jnp.array([0.5, 0.01, 3.0])
    each = quick(jax.vmap(lambda x, s: op(x, w, x_scale=s)))(x, scales)
    for i, scale in enumerate(scales):
        assert_close(each[i], exact(x[i], w, float(scale)), "float32")
    step = lambda x, w: (jnp.tile(op(x, w), (1, 1, 8)), None)
    assert_close(
        quick(lambda x: jax.lax.scan(step, x, pair)[0])(x),
        jnp.tile(op(jnp.tile(wanted, (1, 1, 8)), other), (1, 1, 8)),
    )
    assert op(x[:, :0], w).shape == (3, 0, 32)


def test_forward_mode_on_xla():
    x, t, w = rows(4, 256), rows(4, 256, seed=3), quantised_weight(32, 256)
    tangent = jax.jvp(lambda x: ejx.ScaledMatmul(platform="xla")(x, w), (x,), (t,))[1]
    assert_close(tangent, np.asarray(t, np.float64) @ weight_numbers(w).T, "float32", "gradient")


def test_a_mesh_splits_rows_and_blocks_of_the_weight():
    """Codes and scales on their devices; blocks that do not divide the rows are scales of rows."""
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
    x, op = rows(6, 256), ejx.ScaledMatmul(platform=INTERPRET)
    for n in (256, 320):
        w = quantised_weight(n, 256)
        scales = w.scales if n == 320 else put(w.scales, "columns")
        split = ejx.QuantizedWeight(put(w.codes, "columns"), scales, None, None, w.format)
        assert_close(jax.jit(op)(put(x, "rows"), split), exact(x, w), "float32")
        grad = jax.jit(jax.grad(lambda x, w: op(x, w).sum()))(put(x, "rows"), split)
        assert_close(grad, np.tile(weight_numbers(w).sum(0), (6, 1)), "float32", "gradient")
    (w, _), sizes = stacked(256, 256, (128, 128), 2), jnp.array([2, 3])
    split = jax.tree.map(lambda part: put(part, None, "columns"), w)
    assert_close(jax.jit(op)(put(x, "rows"), split, sizes), op(x, w, sizes), "float32")


@pytest.mark.few(4)
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize(
    "flags", [{}, {"block": "1x128"}, {"block": "1x0", "x_scale": True}, {"block": "0x0"}], ids=str
)
def test_what_the_tuner_is_given(flags, platform):
    for groups in ({}, {"E": 3}):
        problem = example_problem("scaled_matmul", dict(B=2, M=9, K=260, N=70) | groups, "float32", flags)
        assert_agrees("scaled_matmul", platform, problem)


test_refused = refusals(
    "scaled_matmul",
    example_problem,
    [(dict(M=4, K=8), {}, "N"), (dict(M=4, K=8, N=8), {"block": "2x2"}, "block=128x128")],
)

HOPPER = DEVICES["sm_90"]
MANY, FEW = dict(M=8192, K=4096, N=14336), dict(M=8, K=4096, N=4096)
GROUPED = MANY | {"E": 8}
SIZES = [(MANY, "bfloat16", {}), (GROUPED, "bfloat16", {}), (GROUPED, "bfloat16", {"block": "1x0"}),
         (MANY, "bfloat16", {"block": "1x0", "x_scale": True}), (MANY, "bfloat16", {"block": "0x0"}),
         (MANY, "float32", {"block": "1x128"}), (FEW, "bfloat16", {}), (dict(M=300, K=200, N=1000), "float16", {})]  # fmt: skip


@pytest.mark.parametrize(
    "sizes, dtype, flags", [SIZES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SIZES[1:])]
)
def test_kernels_compile_for_hopper(sizes, dtype, flags):
    """Every candidate; Hopper's kernel without spills, but for places of a tile of groups, outside the product."""
    triton = pytest.importorskip("ejkernel_eqx.matmul.float8.triton.compiled")
    problem = example_problem("scaled_matmul", sizes, dtype, flags)
    configs = triton.candidates(problem, HOPPER)
    assert all(from_dict(to_dict(config), triton.ScaledTile) == config for config in configs)
    assert all(triton.config_unsupported(config, problem, HOPPER) is None for config in configs)
    in_gluon = [config.hopper_programs > 0 for config in configs]
    chosen = sizes in (MANY, GROUPED) and flags.get("block") != "1x128" and gluon_unavailable(HOPPER) is None
    assert in_gluon[0] == chosen and bool(triton.remark(configs[0], problem, HOPPER)) != chosen
    for config in configs:
        quantise, multiply = launches("scaled_matmul", problem, config)
        assert multiply.is_gluon == (config.hopper_programs > 0)
        for launch in (quantise, multiply):
            report = compile_ahead(launch, "sm_90")
            most = 16 if "E" in sizes and launch.is_gluon else 0
            assert report.fits and (
                report.spills <= most or (launch is multiply and not multiply.is_gluon)
            ), report


@pytest.mark.slow
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("m, k, n", [(8192, 4096, 14336), (300, 200, 1000)])
def test_kernels_of_training_compile_for_hopper(m, k, n, turned):
    """Those that round floats, lying either way, and the product behind them."""
    triton = pytest.importorskip("ejkernel_eqx.matmul.float8.triton.compiled")
    of: Any = jax.ShapeDtypeStruct
    lying = lambda shape, is_turned: of(shape[::-1] if is_turned else shape, jnp.bfloat16)
    x, weight = (lying(shape, is_turned) for shape, is_turned in zip(((m, k), (n, k)), turned))
    arrays = ScaledArrays(of((1, *x.shape), x.dtype), floats=weight)
    spec = ScaledSpec("bfloat16", 128, turned)
    config = triton.default_config(SCALED.problem_of("scaled_matmul", arrays, spec), HOPPER)
    made: list[Any] = []

    def record(launch: Any, given: Any) -> Any:
        made.append(launch)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in launch.outputs.items()}

    def run(arrays: ScaledArrays) -> Any:
        with executing(record):
            return triton.forward(arrays, spec, config)

    assert jax.eval_shape(run, arrays)["out"].shape == (1, m, n)
    names = [launch.function.fn.__name__ for launch in made]
    assert (
        names[:2] == ["round_kernel", "round_kernel" if turned[0] else "quantise_kernel"] and len(made) == 3
    )
    for launch in made[:2]:
        report = compile_ahead(launch, "sm_90")
        assert report.fits and report.spills == 0, report


@pytest.mark.parametrize(
    "dtype, flags, sizes, tile, words",
    [
        ("float32", {}, {}, {}, "float32"),
        ("bfloat16", {"block": "1x128"}, {}, {}, "1x128"),
        ("bfloat16", {}, {"K": 4088}, {}, "4088 codes"),
        ("bfloat16", {}, {}, {"block_m": 64}, "64x128"),
    ],
)
def test_what_the_kernel_for_hopper_cannot(dtype, flags, sizes, tile, words):
    triton = pytest.importorskip("ejkernel_eqx.matmul.float8.triton.compiled")
    problem = example_problem("scaled_matmul", MANY | sizes, dtype, flags)
    tile = dict(block_m=128, block_n=128, num_warps=4, num_stages=6, hopper_programs=132) | tile
    config = triton.ScaledTile(**tile)
    with pytest.raises(ValueError, match=f"hopper_programs=0, .*{words}"):
        launches("scaled_matmul", problem, config)
    assert "9.0" in (triton.config_unsupported(config, problem, DEVICES["sm_100"]) or "")
    small = dataclasses.replace(config, hopper_programs=0)
    assert triton.config_unsupported(small, problem, HOPPER) is None


def test_where_it_cannot_run():
    triton = pytest.importorskip("ejkernel_eqx.matmul.float8.triton.compiled")
    if triton.unavailable(HOPPER) is None:
        assert "8.9 or newer, the device has 8.0" in (triton.unavailable(DEVICES["sm_80"]) or "")
        assert "NVIDIA" in (triton.unavailable(DEVICES["gfx942"]) or "")
    with pytest.raises(ejx.UnsupportedError, match="float64"), jax.enable_x64(True):
        ejx.ScaledMatmul(platform=INTERPRET)(jnp.ones((5, 256), jnp.float64), W)


X, W = jnp.ones((5, 256)), quantised_weight(16, 256)
FLOATS: Any = jnp.ones((16, 256))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ejx.ScaledMatmul()(X, FLOATS), ["weight", "QuantizedWeight", "fp8-block"]),
        (lambda: ejx.ScaledMatmul()(X, quantised_weight(16, 128)), ["weight", "[N, 256]", "[16, 128]"]),
        (lambda: ejx.ScaledMatmul()(X, W.T), ["weight", "not transposed"]),
        (lambda: ejx.ScaledMatmul()(X, W, jnp.array([5])), ["weight", "[E, N, 256]", "[16, 256]"]),
        (lambda: ejx.ScaledMatmul()(X, stacked(16, 256, (1, 0), 2)[0], jnp.array([5])), ["group_sizes", "(2,)", "(1,)"]),
        (lambda: ejx.ScaledMatmul()(X, stacked(16, 256, (1, 0), 2)[0], jnp.array([5, 1])), ["group_sizes", "at most 5"]),
        (lambda: ejx.ScaledMatmul()(X, quantised_weight(16, 256, (1, 64))), ["weight", "128 columns", "1x64"]),
        (lambda: ejx.ScaledMatmul()(X, ejx.quantise(jnp.ones((16, 256)), "int8")), ["weight", "float8_e4m3fn", "int8"]),
        (lambda: ejx.ScaledMatmul()(X.astype(int), W), ["x", "int"]),
        (lambda: ejx.ScaledMatmul()(X, W, x_scale=0.0), ["x_scale", "above 0", "0.0"]),
        (lambda: ejx.ScaledMatmul()(X, W, x_scale=jnp.ones(5)), ["x_scale", "(5,)"]),
        (lambda: ejx.ScaledMatmul(preferred_element_type="int8"), ["preferred_element_type", "int8"]),
    ],
)  # fmt: skip
def test_errors(make, words, unchecked):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
