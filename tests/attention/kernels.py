"""What every platform's kernels must compute for a case, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.attention.philox import philox_keep
from ejkernel_eqx.attention.reference import visibility
from ejkernel_eqx.attention.spec import AttentionArrays
from tests.attention.cases import Case, make, poison
from tests.attention.dense import exact
from tests.attention.test_xla import assert_gradient_close, cotangents, DIFFERENTIABLE
from tests.tolerances import assert_close


def oracle(case: Case, arrays: AttentionArrays, dout, dlse):
    """`out`, `lse [B, H, T]` and gradients, in float64."""
    spec, rows = case.spec, arrays.rows
    positions = (np.arange(case.T) + spec.offset)[None] if rows is None else np.asarray(rows.position)
    keep: Any = True
    if case.dropout:
        assert arrays.seeds is not None
        keep = philox_keep(
            arrays.seeds[:, :, None, None],
            jnp.asarray(positions)[:, None, :, None],
            jnp.arange(case.S),
            case.dropout,
        )
    given = {name: getattr(arrays, name) for name in DIFFERENTIABLE if getattr(arrays, name) is not None}
    options: dict[str, Any] = dict(
        scale=spec.scale, cap=case.soft_cap, positions=positions, keep=keep, rate=case.dropout, by_row=True
    )
    seen = visibility(arrays, spec)
    (out, lse), grads = exact(given, dout, np.swapaxes(dlse, 1, 2), seen, **options)
    part: dict = {}
    if arrays.q.dtype.itemsize == 2:
        # See `cancelling_part` in `test_xla.py`: what is as uncertain as the 16 bits of the stored output.
        delta = (np.asarray(dout, np.float64) * out).sum(-1)
        part = exact(given, np.zeros_like(np.asarray(dout, np.float32)), delta, seen, **options)[1]
    return out, np.swapaxes(lse, 1, 2), grads, part


def check_kernels(case: Case, run: Callable[..., Any]) -> None:
    """Output, log-sum-exp and all gradients of `run(arrays, dout, dlse, spec)`; the same from poisoned arrays, bit for bit."""
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    out, lse, grads = run(arrays, dout, dlse, spec)
    expected, expected_lse, exact_grads, part = oracle(case, arrays, dout, dlse)
    assert out.dtype == arrays.q.dtype and lse.dtype == jnp.float32
    assert_close(out, expected, case.dtype, name="out")
    assert_close(lse, expected_lse, name="lse")
    for name in DIFFERENTIABLE:
        gradient, array = getattr(grads, name), getattr(arrays, name)
        if array is None:
            assert gradient is None
            continue
        assert gradient.dtype == array.dtype
        assert_gradient_close(gradient, exact_grads[name], part.get(name), case.dtype, f"gradient of {name}")
    poisoned = run(poison(case, arrays), dout, dlse, spec)
    for clean, again in zip(jax.tree.leaves((out, lse, grads)), jax.tree.leaves(poisoned), strict=True):
        np.testing.assert_array_equal(np.asarray(clean), np.asarray(again))
