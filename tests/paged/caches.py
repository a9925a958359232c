"""Small caches of both kinds, and what goes into them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import PagedKVCache, PagedLatentCache
from ejkernel_eqx.paged.cache.quantise import dequantise, LARGEST, quantise
from tests.arrays import array
from tests.recurrence.quick import quick

__all__ = ["dequantise", "LARGEST", "quantise"]
PAGES, SIZE = 6, 3
ROOM = PAGES * SIZE
KINDS = [PagedKVCache, PagedLatentCache]
CASES = [
    (PagedKVCache, "float32", None),
    (PagedKVCache, "int8", "token"),
    (PagedKVCache, "int8", "head"),
    (PagedKVCache, "float8_e4m3fn", "token"),
    (PagedLatentCache, "float16", None),
    (PagedLatentCache, "float8_e4m3fn", "token"),
    (PagedKVCache, "float8_e5m2", "head"),
    (PagedKVCache, ("bfloat16", "int8"), "token"),
    (PagedKVCache, ("int8", "float32"), "head"),
    (PagedLatentCache, ("float8_e5m2", "bfloat16"), "token"),
    (PagedLatentCache, ("float16", "int8"), "head"),
]
# Half a step of each, of a number and of the scale.
RELATIVE = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
ABSOLUTE = {"int8": 0.5, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}
cases = pytest.mark.parametrize("kind, dtype, scales", CASES)
few = pytest.mark.parametrize("kind, dtype, scales", [CASES[0], CASES[2], CASES[5], CASES[8]])

append = quick(lambda cache, x, y, slots: cache.append(x, y, slots))
gather = quick(lambda cache, size=None, dtype=None: cache.gather(size, dtype=dtype), static_argnums=(1, 2))
copy_pages = quick(lambda cache, source, target: cache.copy_pages(source, target))


def make(kind, dtype: Any = "float32", scales=None, **options) -> Any:
    sizes = (2, 8, 4) if kind is PagedKVCache else (8, 4)
    return kind.init(PAGES, SIZE, *sizes, dtype=dtype, scales=scales, **options)


def scaled(cache, scale=1 / 32):
    """Scales a head that reach far enough for `tokens` in int8."""
    if cache.scales != "head":
        return cache
    full = lambda head, scale: None if head is None else jnp.full(head.shape, scale)
    first, second = arrays(cache)[2:]
    return cache.with_scales(full(first, scale), full(second, scale * 2))


def tokens(cache, count, seed=0, lead=()):
    """New keys and values, or latents and rotary keys; rounded so that bfloat16 holds them."""
    rng = np.random.default_rng(seed)
    first, second = arrays(cache)[:2]
    inner = len(cache.batch_shape) + 2
    draw = lambda x: np.clip(rng.normal(size=(*lead, count, *x.shape[inner:])), -3, 3)
    return tuple(array(draw(x).astype(jnp.bfloat16), jnp.float32) for x in (first, second))


def arrays(cache):
    names = (
        ("k", "v", "k_scale", "v_scale")
        if hasattr(cache, "k")
        else ("latent", "rope", "latent_scale", "rope_scale")
    )
    return [getattr(cache, name) for name in names]
