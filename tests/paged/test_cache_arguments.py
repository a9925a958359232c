"""What caches say to wrong arguments, before anything is computed."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import PagedKVCache, PagedLatentCache, RaggedBatch


def numbers(*shape, dtype: Any = "float32"):
    return jnp.ones(shape, dtype)


def cache_of(**arrays_):
    return PagedKVCache(**{"k": numbers(5, 4, 3, 8), "v": numbers(5, 4, 3, 2), **arrays_})


def latent_of(**arrays_):
    return PagedLatentCache(**{"latent": numbers(5, 4, 8), "rope": numbers(5, 4, 2), **arrays_})


init = functools.partial(PagedKVCache.init, 5, 4, 3, 8)
PLAIN, HEAD = cache_of(), init(dtype="int8", scales="head")
VALUES = init(dtype=("bfloat16", "int8"), scales="head")
ALONE: Any = ("int8",)
LAYERS = init(batch_shape=(2,))
BATCH = RaggedBatch.build([1], [1], [[0]], page_size=3)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: PagedKVCache.init(2**20, 2**11, 3, 8), "num_pages: expected at most"),
        (lambda: init(batch_shape=(0,)), "batch_shape: expected"),
        (lambda: init(dtype="int32"), "dtype: expected one of .*int32"),
        (lambda: init(dtype="float64"), "dtype: expected 64-bit types"),
        (lambda: init(scales="token"), "scales: expected None for pages of float32"),
        (lambda: init(dtype="int8", scales="page"), "scales: expected 'token'"),
        (lambda: init(dtype=ALONE), "or a pair, received 1"),
        (lambda: init(dtype=("int8", "int32")), "dtype: expected one of .*int32"),
        (
            lambda: init(dtype=("bfloat16", "float32"), scales="head"),
            "scales: expected None for pages of bfloat16 and float32",
        ),
        (lambda: VALUES.with_scales(numbers(3), numbers(3)), "k_scale: expected None for pages"),
        (lambda: VALUES.with_scales(None, None), "v_scale: expected floats"),
        (lambda: cache_of(v=numbers(5, 4, 3, 2, dtype="int8")), "v_scale: expected scales"),
        (
            lambda: PagedKVCache(VALUES.k, VALUES.v, None, None, numbers(3), numbers(3)),
            "k_scale: expected None for pages of bfloat16",
        ),
        (lambda: PagedLatentCache.init(5, 4, 0, 8), "latent_dim: expected"),
        (lambda: PagedLatentCache.init(5, 4, 8, 0), "rope_dim: expected"),
        (lambda: cache_of(k=numbers(4, 3, 8)), "k: expected pages"),
        (lambda: cache_of(v=numbers(5, 4, 2, 8)), "v: expected the axes of k"),
        (lambda: cache_of(k=numbers(5, 4, 3, 8, dtype="int8")), "k_scale: expected scales"),
        (lambda: cache_of(k_scale=numbers(3)), "k_scale: expected None for pages of float32"),
        (
            lambda: PagedKVCache(HEAD.k, HEAD.v, None, None, numbers(3), numbers(5, 4, 3)),
            "v_scale: expected the kind",
        ),
        (lambda: PagedKVCache(HEAD.k, HEAD.v, None, None, numbers(2), numbers(3)), "k_scale: expected shape"),
        (lambda: cache_of(lengths=numbers(2, dtype="int32")), "lengths: expected both"),
        (lambda: latent_of(rope=numbers(5, 3, 2)), "rope: expected the axes of latent"),
        (lambda: latent_of(latent_scale=numbers()), "latent_scale: expected None"),
        (lambda: PLAIN.bind(numbers(2, 3), [1, 1]), r"page_table: expected ints \[.., N, M\]"),
        (lambda: PLAIN.bind(numbers(2, dtype=int), [1, 1]), "page_table: expected ints"),
        (lambda: PLAIN.bind(numbers(2, 3, dtype=int), [1]), r"lengths: expected ints \(2,\)"),
        (lambda: PLAIN.bind(numbers(2, 3, dtype=int)), "lengths: expected ints .* received None"),
        (lambda: PLAIN.bind(BATCH), "page_size=4, received one with 3"),
        (lambda: PLAIN.bind(BATCH, [1]), "lengths: expected None with a RaggedBatch"),
        (lambda: PLAIN.gather(), "gather: expected a cache bound to tables"),
        (lambda: PLAIN.bind([[1]], [1]).gather(-1), "max_length: expected"),
        (lambda: PLAIN.bind([[1]], [1]).gather(dtype="int8"), "dtype: expected one of"),
        (lambda: LAYERS.bind([[[1]]] * 3, [[1]] * 3).gather(), "page_table: expected shape"),
        (lambda: PLAIN.with_scales(numbers(3), numbers(3)), "with_scales: expected a cache"),
        (lambda: HEAD.with_scales(numbers(2), numbers(3)), r"k_scale: expected floats \(3,\)"),
        (lambda: HEAD.with_scales(numbers(3), -numbers(3)), "v_scale: expected positive numbers"),
        (lambda: HEAD.with_scales(numbers(3) * np.nan, numbers(3)), "k_scale: expected positive numbers"),
        (lambda: PLAIN.append(numbers(2, 8), numbers(2, 3, 2), [0, 1]), r"k: expected floats \[T, 3, 8\]"),
        (lambda: PLAIN.append(numbers(2, 3, 8, dtype=int), numbers(2, 3, 2), [0, 1]), "k: expected floats"),
        (lambda: PLAIN.append(numbers(), numbers(), []), r"k: expected floats \[T, 3, 8\]"),
        (lambda: PLAIN.append(numbers(2, 3, 8), numbers(1, 3, 2), [0, 1]), r"v: expected floats \[2, 3, 2\]"),
        (lambda: PLAIN.append(numbers(2, 3, 8), numbers(2, 3, 2), [0, 1, 2]), r"slots: expected ints \[2\]"),
        (lambda: PLAIN.append(numbers(2, 3, 8), numbers(2, 3, 2), [0.0, 1.0]), "slots: expected ints"),
        (lambda: LAYERS.append(numbers(2, 3, 8), numbers(2, 3, 8), [0, 1]), "k: expected floats"),
        (lambda: latent_of().append(numbers(2, 8), numbers(2, 3), [0, 1]), r"rope: expected floats \[2, 2\]"),
        (lambda: PLAIN.copy_pages([1], [1, 2]), r"target: expected ints \[C\]"),
        (lambda: PLAIN.copy_pages([1.0], [1]), "source: expected ints"),
    ],
)
def test_wrong_arguments(call, words, unchecked):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "at, name", list(enumerate(["num_pages", "page_size", "num_kv_heads", "head_dim", "v_head_dim"]))
)
def test_sizes_of_zero(at, name):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        PagedKVCache.init(*(0 if n == at else 4 for n in range(5)))
