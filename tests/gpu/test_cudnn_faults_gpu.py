"""The shapes that cuDNN is reported to compute wrongly, on the card against the float64 reference.

What is denied is refused by name, and another platform computes it. What the installed version is reported to have mended is computed by cuDNN: if
that fails, the version in `attention/cudnn.py` is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import cudnn
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.spec import AttentionGrads
from ejkernel_eqx.dispatch import device_facts
from tests.attention.cases import Case, make
from tests.attention.kernels import cotangents, Result

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.test_attention_gpu import assert_agrees

pytestmark = pytest.mark.gpu
NEEDS = ejx.FlashAttention.operation

CASES = [
    Case(name="one-query", T=1, S=128, D=64, V=64),
    Case(name="half-a-tile", T=192, S=192, D=128, V=128),
    Case(name="half-a-tile-causal", T=256, S=192, D=64, V=64, right=0, offset=0),
    Case(name="wide-window", T=256, S=256, D=256, V=256, left=40, right=0),
    Case(name="odd-tiles", T=200, S=200, D=64, V=64, right=0),
]


def test_the_version_is_known():
    assert device_facts().cudnn >= (9, 0, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("low", [False, True], ids=["plain", "scores-near-minus-120"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_faults(case, low, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    arrays, _ = make(case)
    if low:  # every score of every query: the sum of its exponentials underflows
        q, k = (x * 0.1 for x in (arrays.q, arrays.k))
        arrays = arrays._replace(q=q.at[..., 0].set(1.0), k=k.at[..., 0].set(-120.0 / case.spec.scale))
    dout, dlse = cotangents(case)
    window = None if case.left is None else (case.left, 0)
    offset = 0 if case.right == 0 else None

    def run(platform):
        attention = ejx.FlashAttention(case.right == 0, window, platform=platform)
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, q_offset=offset), arrays.q, arrays.k, arrays.v)
        return Result(out, None, AttentionGrads(*pull(dout)))

    reason = cudnn.unsupported(problem_of(NEEDS, arrays, case.spec), device_facts())
    assert_agrees(case, arrays, dout, jnp.zeros_like(dlse), run(None))
    if reason is None:
        assert_agrees(case, arrays, dout, jnp.zeros_like(dlse), run("cuda"))
    else:
        with pytest.raises(ejx.UnsupportedError, match="is denied"):
            run("cuda")
