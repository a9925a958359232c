"""What a batch says of its tokens, alike for all layers."""

import jax
import numpy as np
import pytest

from ejkernel_eqx import nn
from tests.arrays import normal

LAYERS = {
    "attention": lambda key: nn.MultiHeadAttention(8, num_heads=2, key=key),
    "recurrent": lambda key: nn.Mamba1Mixer(8, key=key),
    "cells": lambda key: nn.GRU(8, 4, key=key),
}


@pytest.mark.parametrize(
    "name, dtype", [("attention", np.uint8), ("recurrent", np.uint32), ("cells", np.uint8)]
)
def test_padding_among_unsigned_ids(name, dtype):
    """The padding that a mask marks is no segment of its own number, which such ids cannot say by a negative one."""
    layer, x = LAYERS[name](jax.random.key(0)), normal(1, (6, 8))
    real, ids = np.array([0, 1, 1, 1, 1, 0], bool), np.array([0, 0, 0, 1, 1, 1])
    expected = layer(x, segment_ids=np.where(real, ids, -1))
    found = layer(x, padding_mask=real, segment_ids=ids.astype(dtype))
    np.testing.assert_array_equal(np.asarray(found)[real], np.asarray(expected)[real])
    assert not np.asarray(found)[~real].any()
