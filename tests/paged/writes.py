"""Pages and tokens to write, and what a kernel that writes must leave in them: what XLA's scatter does."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.paged.cache.write import write as scatter
from ejkernel_eqx.paged.spec import WriteArrays
from tests.arrays import array
from tests.paged.cases import LARGEST
from tests.recurrence.quick import quick

P, p, K, T = 3, 4, 3, 7
SLOTS = (0, -1, 11, 5, P * p, -P * p, 10)  # of these three are nowhere
KINDS = {"k": 24, "v": 16}
LATENT = {"k": 32, "rope": 8}


def make(dtype, *, new="float32", scales=None, kinds=KINDS, lead=(), pages_lead=(), heads=K, seed=0):
    """Pages full of numbers that must stay, and tokens of which those that go nowhere hold NaN."""
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation(SLOTS) for _ in range(int(np.prod(lead, dtype=int)))]).reshape(*lead, T)
    if lead and not pages_lead:  # one set of pages: no slot twice
        slots = np.where(np.arange(slots.size).reshape(slots.shape) < T, slots, -1)
    nowhere = (slots < 0) | (slots >= P * p)
    pages, tokens = {}, {}
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * len(kinds)
    for (name, width), dtype in zip(kinds.items(), dtypes, strict=True):
        values = rng.standard_normal((*lead, T, heads, width)) * rng.choice(
            [1e-3, 1, 50], (*lead, T, heads, 1)
        )
        tokens[name] = array(np.where(nowhere[..., None, None], np.nan, values).astype(new))
        held = rng.integers(-100, 100, (*pages_lead, P, p, heads, width))
        pages[name] = array(held.astype("float32").astype(dtype))
        shape = {"token": (*pages_lead, P, p, heads), "head": (*pages_lead, heads)}.get(scales or "")
        if shape is not None and dtype in LARGEST:
            pages[f"{name}_scale"] = array(rng.uniform(0.05, 0.2, shape).astype("float32"))
    return WriteArrays(pages, tokens, array(slots.astype(np.int32)))


def assert_same(write: Callable[[WriteArrays], dict[str, Any]], arrays: WriteArrays) -> None:
    """`write(arrays)` and XLA's scatter agree, bit for bit where nothing is divided. XLA may divide by a constant in another way: scales agree to
    the last bits, and what is stored by them to one step."""
    expected, results = quick(scatter)(arrays), write(arrays)
    assert results.keys() == arrays.pages.keys()
    for name in results:
        got, want = np.asarray(results[name]), np.asarray(expected[name])
        assert got.dtype == want.dtype and got.shape == arrays.pages[name].shape, name
        if name.endswith("_scale"):
            np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, rtol=3e-7, err_msg=name)
        elif f"{name}_scale" not in results:
            np.testing.assert_array_equal(bits(got), bits(want), name)
        else:
            number, other = got.astype(np.float32), want.astype(np.float32)
            relative, absolute = (2.0**-2, 2.0**-16) if got.dtype == jnp.float8_e5m2 else (2.0**-3, 2.0**-9)
            step = 1 if got.dtype == np.int8 else np.maximum(relative * np.abs(other), absolute)
            assert (np.abs(number - other) <= step).all(), name
            assert (number != other).mean() < 0.01, name
            assert_untouched(arrays, name, got)


def assert_untouched(arrays, name, got):
    """What no token goes to keeps its bits."""
    before = np.asarray(arrays.pages[name])
    sets = before.size // np.prod(before.shape[-4:])
    kept = np.ones((sets, P * p), bool)
    for one, slots in zip(kept, np.asarray(arrays.slots).reshape(sets, -1)):
        one[slots[(slots >= 0) & (slots < P * p)]] = False
    rows = lambda x: bits(x).reshape(sets, P * p, -1)[kept]
    np.testing.assert_array_equal(rows(got), rows(before), name)


def bits(x):
    return x.view(f"u{x.itemsize}")
