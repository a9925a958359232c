"""The example of a user's kernel: run as it stands, and its two Triton kernels against the formula in float64."""

import importlib
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.custom.workload import example_problem
from ejkernel_eqx.dispatch import kernel_registry
from ejkernel_eqx.launch import compile_ahead
from tests.compiled import DEVICES
from tests.tolerances import assert_close

from .test_examples import run

PATH = pathlib.Path(__file__).parents[2] / "examples" / "custom_kernel.py"


@pytest.fixture(scope="module")
def example(examples):
    yield importlib.import_module("custom_kernel")
    del sys.modules["custom_kernel"]


@pytest.mark.slow
def test_it_runs(example):
    out, _ = run("custom_kernel.py")
    errors = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines() if "largest" in line]
    assert len(errors) == (2 if example.triton else 1) and max(errors) < 1e-5
    assert example.triton is None or ("config    Blocks(forward=Block(" in out and "autotune" in out)
    first, last = out.split("training: loss ")[1].split(" -> ")
    assert float(first) > 4.5 and float(last) < 1.0


def exact(logits, labels, dloss, dlse, z_loss):
    """Loss, log-sum-exp and the gradient of the logits, in float64."""
    z = np.asarray(logits).astype(np.float64)
    labels = np.asarray(labels)
    top = z.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(-1, keepdims=True)))[..., 0]
    target = np.arange(z.shape[-1]) == labels[..., None]
    loss = np.where(labels >= 0, lse - (target * z).sum(-1) + z_loss * lse**2, 0)
    dloss = np.where(labels >= 0, dloss, 0)
    scale = dlse + dloss * (1 + 2 * z_loss * lse)
    return loss, lse, scale[..., None] * np.exp(z - lse[..., None]) - dloss[..., None] * target


CASES = {
    "odd": ((3, 2, 97), "float32", 1e-2),
    "one block and a half": ((2, 200), "bfloat16", 1e-3),
    "no batch axis": ((33,), "float16", 0.0),
    "one word": ((4, 1), "float32", 1e-2),
    "no rows": ((0, 16), "float32", 1e-2),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("platform", "case"),
    [*(("triton-interpret", case) for case in CASES), ("xla", "odd"), ("xla", "no rows")],
)
def test_against_the_formula(example, platform, case):
    if platform != "xla":
        pytest.importorskip("triton")
    shape, dtype, z_loss = CASES[case]
    blocks = example.Blocks(example.Block(128, 4), example.Block(64, 4))
    config = blocks if platform != "xla" else None
    kernel = example.CrossEntropy(z_loss, platform=platform, config=config)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.standard_normal(shape)).astype(dtype)
    labels = rng.integers(0, shape[-1], shape[:-1]).astype(np.int32)
    labels = jnp.asarray(np.where(rng.random(shape[:-1]) < 0.3, -100, labels))
    dloss, dlse = (rng.standard_normal(shape[:-1]).astype(np.float32) for _ in range(2))

    @jax.jit
    def run(logits):
        (loss, lse), pull = jax.vjp(lambda x: kernel.launch(logits=x, labels=labels), logits)
        return loss, lse, pull((jnp.asarray(dloss), jnp.asarray(dlse)))[0]

    loss, lse, dlogits = run(logits)
    expected = exact(logits, labels, dloss, dlse, z_loss)
    assert dlogits.dtype == dtype and loss.dtype == lse.dtype == jnp.float32
    assert_close(loss, expected[0], name="loss")
    assert_close(lse, expected[1], name="lse")
    assert_close(dlogits, expected[2], kind="gradient", name="dlogits")
    # Ignored rows are exactly zero.
    ignored = np.asarray(labels) < 0
    assert not np.asarray(loss)[ignored].any()
    only_loss = jax.jit(jax.grad(lambda x: jnp.sum(kernel(x, labels))))(logits)
    assert not np.asarray(only_loss.astype(jnp.float32))[ignored].any()
    np.testing.assert_array_equal(*(run(logits)[2].view(jnp.uint8) for _ in range(2)))


def test_extreme_logits(example):
    """Large values do not overflow, and a word that is masked out by -inf has no probability."""
    pytest.importorskip("triton")
    logits = jnp.array([[3e4, -3e4, 0.0, -jnp.inf, 2.9e4], [-jnp.inf] * 4 + [1.0]])
    labels = jnp.array([4, 4])
    kernels = [example.CrossEntropy(platform=name) for name in ("triton-interpret", "xla")]
    losses = [kernel(logits, labels) for kernel in kernels]
    assert_close(losses[0], losses[1])
    grads = [jax.grad(lambda x, k=kernel: jnp.sum(k(x, labels)))(logits) for kernel in kernels]
    assert_close(grads[0], np.nan_to_num(grads[1]))
    assert losses[0][1] == 0


def test_every_candidate_compiles(example):
    pytest.importorskip("triton")
    implementation = kernel_registry.get("examples.cross_entropy", "triton")
    dims, flags = {"B": 4, "V": 50257}, {"z_loss": 0.1}
    problem = example_problem("examples.cross_entropy", dims, "bfloat16", flags)
    candidates = implementation.load().candidates(problem, DEVICES["sm_90"])
    assert len(candidates) == len(set(candidates)) == 8
    assert candidates[0] == implementation.load().default_config(problem, DEVICES["sm_90"])
    work = implementation.make_workload(problem)
    assert work is not None and work.launches is not None
    for config in (candidates[0], candidates[-1]):
        reports = [compile_ahead(launch, "sm_90") for launch in work.launches(config)]
        assert len(reports) == 2 and all(report.fits and report.spills == 0 for report in reports)


def test_the_guide_shows_the_code_that_runs():
    guide = (PATH.parents[1] / "docs" / "guides" / "custom-kernels.md").read_text()
    shown = re.findall(r'```python title="examples/custom_kernel.py"\n(.*?)```', guide, re.DOTALL)
    assert len(shown) >= 8
    code = PATH.read_text()
    for block in shown:
        assert block in code, block
