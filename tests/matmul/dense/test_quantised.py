"""Rows by quantised weights, on XLA and by the Triton kernel, interpreted: against their numbers in float64."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.launch import compile_ahead, TARGETS
from ejkernel_eqx.matmul.dense.core import KINDS
from ejkernel_eqx.matmul.dense.triton import compiled
from ejkernel_eqx.matmul.dense.triton.compiled import RowsTile, TritonConfig
from ejkernel_eqx.matmul.dense.workload import example_problem, make_arrays, spec_of
from ejkernel_eqx.quantised.format import form_of, word_of
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, normal, quick
from tests.compiled import DEVICES, launches_of
from tests.matmul.dense.weights import FORMS, weight
from tests.meshes import context, HEADS, mesh_of, ROWS
from tests.quantised.test_models import models
from tests.tolerances import assert_close

platform = platforms()


def tiled(*tile: int) -> Any:
    return dict(platform=INTERPRET, config=TritonConfig(RowsTile(*tile), True, "ieee", False))


@pytest.mark.parametrize("name", FORMS)
def test_every_format(name):
    """Rows, features and columns that fill no tile; up to 8 rows a tile without tensor cores, more with them, in one part and in several."""
    pytest.importorskip("triton")
    for rows, features, columns, *tile in (
        (1, 96, 20, 1, 8, 64, 4, 1),
        (5, 224, 10, 4, 4, 128, 1, 1),
        (3, 400, 140, 16, 16, 64, 4, 1),
        (19, 272, 33, 16, 32, 32, 4, 1, 4),
        (17, 384, 9, 32, 16, 128, 4, 1, 2),
    ):
        coded, numbers = weight(name, columns, features)
        x = normal(1, rows, features)
        wanted = np.asarray(x, np.float64) @ numbers.T
        assert_close(ejx.Matmul(**tiled(*tile))(x, coded), wanted, name=f"{rows} rows")
    assert_close(ejx.Matmul(platform="xla")(x, coded), wanted)


def test_the_class_has_two_names():
    assert ejx.QuantizedMatmul is ejx.Matmul


def test_a_code_of_nan_is_in_the_results_of_its_row():
    pytest.importorskip("triton")
    coded, _ = weight("fp8", 9, 64)
    codes = np.array(coded.codes)
    codes[2, 5], codes[6, 43] = 0x7F, 0xFF
    coded = dataclasses.replace(coded, codes=codes)
    for rows, *tile in ((1, 1, 8, 64, 4, 1), (2, 2, 4, 64, 1, 1), (2, 16, 16, 64, 4, 1)):
        found = ejx.Matmul(**tiled(*tile))(normal(0, rows, 64), coded)
        assert (np.isnan(found) == np.isin(np.arange(9), [2, 6])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_surrounds_the_products(rows, dtype, platform):
    """Norm, bias, gate, residual and three right sides, in the dtype of rows."""
    x, norm = normal(0, rows, 64, dtype=dtype), 1 + 0.1 * normal(1, 64)
    (w, nw), (u, nu), (v, nv) = (weight("nvfp4" if rows == 1 else "zeros", n, 64, n) for n in (24, 24, 9))
    bias, residual = normal(2, 24), normal(3, rows, 24, dtype=dtype)
    wide = lambda a: np.asarray(a, np.float64)
    h = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
    gate, up = h @ nw.T + wide(bias), h @ nu.T
    out = ejx.Matmul("silu", gated=True, platform=platform)(
        x, w, u, biases=(bias, None), norm=norm, residual=residual
    )
    assert out.dtype == dtype
    assert_close(out, gate / (1 + np.exp(-gate)) * up + wide(residual))
    outs = ejx.Matmul(platform=platform).together(x, w, u, v, biases=(None, bias, None), norm=norm)
    for found, wanted in zip(outs, (h @ nw.T, up + wide(bias), h @ nv.T), strict=True):
        assert_close(found, wanted)


def test_one_row_with_its_norm():
    """The norm of one row is not a launch of its own."""
    pytest.importorskip("triton")
    (w, numbers), (u, _), x, norm = (
        weight("int4", 20, 256),
        weight("int4", 6, 256),
        normal(0, 1, 256),
        normal(1, 256),
    )
    config = TritonConfig(RowsTile(1, 8, 128, 4, 1), False, "ieee", False)
    found = ejx.Matmul(platform=INTERPRET, config=config).together(x, w, u, norm=norm)[0]
    h = np.asarray(x, np.float64)
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm, np.float64)
    assert_close(found, h @ numbers.T)


def test_gradients(platform):
    """Those of the numbers, to all floats; weights are constants."""
    (w, nw), (u, nu) = weight("mxfp4", 24, 64), weight("mxfp4", 24, 64, 1)
    given = {
        "x": normal(0, 2, 3, 64),
        "norm": normal(1, 64),
        "bias": normal(2, 24),
        "residual": normal(3, 2, 3, 24),
    }
    op = ejx.Matmul("gelu", gated=True, platform=platform)

    def loss(given, w, u):
        out = op(
            given["x"], w, u, biases=(None, given["bias"]), norm=given["norm"], residual=given["residual"]
        )
        return jnp.sum(jnp.sin(out))

    found = quick(jax.grad(loss))(given, w, u)
    wanted = jax.grad(lambda given: loss(given, jnp.float32(nw), jnp.float32(nu)))(given)
    for name, x in wanted.items():
        assert_close(found[name], x, kind="gradient", name=name)
    grads = eqx.filter_grad(lambda both: loss(both[0], both[1], u))((given, w))[1]
    assert jax.tree.leaves(grads) == []


def test_composes(platform):
    """vmap of rows and of weights, and a scan over them."""
    both = [weight("zeros", 16, 64, seed)[0] for seed in (0, 1)]
    x, op = normal(0, 2, 3, 64), ejx.Matmul(platform=platform)
    wanted = [op(x, w) for w in both]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *both)
    assert_close(quick(jax.vmap(op, (0, None)))(x, both[0]), wanted[0])
    for found in (
        quick(jax.vmap(op, (None, 0)))(x, stack),
        quick(lambda x, stack: jax.lax.scan(lambda x, w: (x, op(x, w)), x, stack)[1])(x, stack),
    ):
        for one, expected in zip(found, wanted, strict=True):
            assert_close(one, expected)


def test_decoding_reads_codes():
    """A step of a quantised model takes the kernel, whose format is told; so does that of a projection alone."""
    pytest.importorskip("triton")
    model, floats = models("attention", "int4", platform=INTERPRET)
    cache, tokens = model.init_cache(2, 64), jnp.array([[3], [5]])
    step = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache))
    assert_close(step(model, tokens, cache)[0], step(floats, tokens, cache)[0])
    chosen = [c for c in ejx.explain(model, tokens, cache).choices if c.operation == "matmul"]
    # Queries, keys and values; the output; gate and up; down.
    assert len({c.path for c in chosen}) >= 3 and len(chosen) >= 4
    assert all("weights=uint4-1x" in c.problem and c.platform == INTERPRET for c in chosen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "automatic"])
@pytest.mark.parametrize("spec", [P(HEADS), P(None, HEADS)], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["int8", "zeros", "fp8 blocks"])
def test_over_devices(name, spec, kind, platform):
    """Rows and columns of codes, with scales split where blocks allow it: no codes are moved but those whose rows share scales."""
    mesh = mesh_of(kind)
    coded, numbers = weight(name, 256, 512)
    x = normal(0, 4, 512)

    def placed(a, spec=spec):
        fits = a.ndim == 2 and all(n % 2 == 0 for n, axis in zip(a.shape, (*spec, None)) if axis)
        return jax.device_put(a, NamedSharding(mesh, spec if fits else P()))

    split, x = jax.tree.map(placed, coded), placed(x, P(ROWS, spec[1] if len(spec) > 1 else None))
    op = ejx.Matmul(platform=platform)
    with context(kind, mesh):
        call = jax.jit(lambda x, w: op(x, w)).lower(x, split).compile()
        out = call(x, split)
    assert_close(np.asarray(out), np.asarray(normal(0, 4, 512), np.float64) @ numbers.T)
    # On an automatic mesh an interpreted kernel is not split.
    if kind == "explicit" and platform == INTERPRET and (name != "fp8 blocks" or len(spec) > 1):
        assert "all-gather" not in str(call.as_text())


def test_problems_name_the_format():
    for form in FORMS.values():
        assert form_of(word_of(form)) == form
    problem = example_problem("matmul", dict(M=2, K=256, N=40), "float32", dict(weights="int4"))
    assert problem.flag("weights") == "uint4-1x128-bfloat16"
    spec = spec_of(problem)
    arrays = make_arrays(problem, spec, 0)
    out = KINDS[1].reference(arrays, spec)["out"]
    assert out.shape == (1, 2, 40) and 0.1 < float(jnp.abs(out).mean()) < 10


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["int8", "fp8 blocks", "zeros", "nvfp4"])
def test_defaults_compile_ahead(name, target):
    """The first configuration of a step of one token and of several, and of a prompt, for a layer of an 8B model."""
    pytest.importorskip("triton")
    for rows in (1, 3, 16, 64, 200):
        flags: dict[str, Any] = {"weights": "int8", "norm": True}
        problem = example_problem("matmul", dict(M=rows, K=4096, N=4096), "bfloat16", flags)
        known = dict(problem.flags) | {"weights": word_of(FORMS[name])}
        report = _compiled_default(dataclasses.replace(problem, flags=tuple(sorted(known.items()))), target)
        assert report.fits and report.spills == 0, (rows, report)


def _compiled_default(problem: Any, target: str) -> Any:
    config, spec = compiled.default_config(problem, DEVICES[target]), spec_of(problem)
    assert compiled.config_unsupported(config, problem, DEVICES[target]) is None
    shapes = jax.eval_shape(lambda: make_arrays(problem, spec, 0))
    found = launches_of(lambda a: compiled.forward(a, spec, config), shapes)
    names = ("rows_kernel", "hopper_coded_kernel", "floats_kernel")
    return compile_ahead(next(found[name] for name in names if name in found), TARGETS[target])


X = jnp.ones((5, 64))


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda w: ejx.Matmul().together(X, w, weight("zeros", 4, 64)[0]),
            ["weights", "one format", "int8", "uint4"],
        ),
        (
            lambda w: ejx.Matmul(gated=True)(X, w, jnp.ones((4, 64))),
            ["weights", "an array", "int8", "astype"],
        ),
        (lambda w: ejx.Matmul()(X[:, :32], w), ["weights[0]", "[N, 32]", "(4, 64)"]),
        (
            lambda w: ejx.Matmul()(X, ejx.quantise(normal(0, 64, 4), "int8").T),
            ["weights[0]", "transposed", "astype"],
        ),
        (lambda w: ejx.Matmul()(X, w, biases=[jnp.ones(3)]), ["biases[0]", "(3,)"]),
    ],
)
def test_errors(make, words, unchecked):
    with pytest.raises(ValueError) as error:
        make(weight("int8", 4, 64)[0])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_the_kernel_does_not_take():
    """Rows that are no whole words of codes are XLA's, or an error where the kernel is asked for by name."""
    pytest.importorskip("triton")
    coded, numbers = weight("channel zeros", 5, 36)
    x = normal(0, 2, 36)
    assert_close(ejx.Matmul()(x, coded), np.asarray(x, np.float64) @ numbers.T)
    with pytest.raises(ejx.UnsupportedError, match="words of 8 codes"):
        ejx.Matmul(platform=INTERPRET)(x, coded)
    problem = example_problem("matmul", dict(M=4, K=64, N=8), "float32", dict(weights="int8", norm=True))
    reason = compiled.config_unsupported(TritonConfig(RowsTile(2, 16, 32, 4, 1)), problem, DEVICES["sm_90"])
    assert reason is not None and "norm_apart" in reason
