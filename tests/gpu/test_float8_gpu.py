"""The float8 product on a GPU, against NumPy in float64 on the quantised operands.

python -m pytest tests/gpu/test_float8_gpu.py
"""

import equinox as eqx
import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import quick
from tests.gpu.host import candidates, example_problem
from tests.matmul.float8.cases import (
    as_numbers,
    by_group,
    CASES,
    exact,
    quantised_weight,
    rows,
    stacked,
    weight_numbers,
)
from tests.quantised.test_float8_training import both, in_float8
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "scaled_matmul"


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_formula(name):
    """Within what tensor cores keep of sums in float8; the same bit for bit when run again."""
    shape, n, block, scale, dtype, x_scale, out_dtype = CASES[name]
    x, w = rows(*shape, dtype=dtype), quantised_weight(n, shape[-1], block, scale)
    op = ejx.ScaledMatmul(preferred_element_type=out_dtype, platform="triton")
    call = quick(lambda x, w: op(x, w, x_scale=x_scale))
    out = call(x, w)
    assert_close(out, exact(x, w, x_scale), "bfloat16")
    np.testing.assert_array_equal(np.asarray(call(x, w)), np.asarray(out))
    if dtype == "bfloat16":
        dx = jax.grad(lambda x: op(x, w, x_scale=x_scale).astype("float32").sum())(x)
        wanted = np.broadcast_to(weight_numbers(w).sum(0), x.shape)
        assert_close(dx, wanted, dtype, "gradient", scale=float(np.abs(weight_numbers(w)).sum(0).max()))


@pytest.mark.parametrize("block, x_scale", [((128, 128), None), ((1, 0), None), ((0, 0), 0.01)])
def test_groups(block, x_scale):
    """Every candidate; empty groups, groups that tiles do not divide, and rows past the last."""
    (w, each), sizes = stacked(264, 720, block, 4), np.array([300, 0, 1, 390])
    x, matrices = rows(700, 720, dtype="bfloat16"), [weight_numbers(one).T for one in each]
    wanted = by_group(as_numbers(x, x_scale), matrices, sizes)
    flags = {"block": f"{block[0]}x{block[1]}", "x_scale": x_scale is not None}
    problem = example_problem("scaled_matmul", dict(M=700, K=720, N=264, E=4), "bfloat16", flags)
    for config in candidates("scaled_matmul", problem):
        op = ejx.ScaledMatmul(platform="triton", config=config)
        call = quick(lambda x, w, s, op=op: op(x, w, s, x_scale=x_scale))
        assert_close(call(x, w, sizes), wanted, "bfloat16", name=str(config))


@pytest.mark.parametrize(
    "block, x_scale", [((128, 128), None), ((1, 0), None), ((0, 0), 0.01), ((1, 128), None)]
)
@pytest.mark.parametrize("count", [8, 64, 700])
def test_every_candidate(count, block, x_scale):
    """Several tiles of rows and columns, the last of which are not full; a last group that is not either."""
    x, w = rows(count, 720, dtype="bfloat16"), quantised_weight(640, 720, block)
    expected = exact(x, w, x_scale)
    flags = {"block": f"{block[0]}x{block[1]}", "x_scale": x_scale is not None}
    problem = example_problem("scaled_matmul", dict(M=count, K=720, N=640), "bfloat16", flags)
    for config in candidates("scaled_matmul", problem):
        op = ejx.ScaledMatmul(platform="triton", config=config)
        assert_close(quick(lambda x, w, op=op: op(x, w, x_scale=x_scale))(x, w), expected, name=str(config))


@pytest.mark.parametrize("platform", ["triton", "xla"])
@pytest.mark.parametrize("n, k, count", [(512, 384, 640), (200, 300, 331)])
def test_training(n, k, count, platform):
    """A layer and both gradients, against the formula; the same bit for bit when run again. XLA must not leave out the rounding."""
    layer = eqx.nn.Linear(k, n, use_bias=False, dtype="bfloat16", key=jax.random.key(0))
    layer = ejx.with_float8_training(layer, platform=platform)
    x, dy = rows(count, k, dtype="bfloat16"), rows(count, n, dtype="bfloat16", seed=2)
    out, d_layer, dx = both(layer, x, dy)
    wanted = in_float8(x.astype("float32"), layer.weight.array, dy.astype("float32"))
    for found, expected in zip((out, dx, d_layer.weight.array), wanted, strict=True):
        assert_close(found, expected, "bfloat16", "gradient")
    assert eqx.tree_equal(both(layer, x, dy), (out, d_layer, dx))
