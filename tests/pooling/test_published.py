"""Pooling as sentence-transformers does it, in PyTorch: the mean, the largest and the last token of what is no padding, and unit length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET
from tests.tolerances import assert_close

torch = pytest.importorskip("torch")


def theirs(reduction: str, x, mask):
    wide = mask.unsqueeze(-1).expand(x.size()).float()
    if reduction == "mean":
        return (x * wide).sum(1) / torch.clamp(wide.sum(1), min=1e-9)
    if reduction == "max":
        return x.masked_fill(wide == 0, -1e9).max(1)[0]
    last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
    return x[torch.arange(x.shape[0]), last]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("reduction", ["mean", "max", "last"])
@pytest.mark.parametrize("normalize", [False, True])
def test_sentence_embeddings(reduction, side, normalize, platform):
    """With gradients, for padding on either side."""
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((4, 9, 12)), rng.standard_normal((4, 12))
    mask = np.arange(9) < np.array([[9], [5], [1], [7]])
    mask = mask[:, ::-1].copy() if side == "left" else mask
    there = torch.tensor(x, requires_grad=True)
    expected = theirs(reduction, there, torch.tensor(mask))
    if normalize:
        expected = torch.nn.functional.normalize(expected, p=2, dim=1)
    expected.backward(torch.tensor(dout))
    op = ejx.MeanPooling(reduction, normalize=normalize, platform=platform)
    call = lambda x: op(x, mask=jnp.asarray(mask))
    out, pull = jax.vjp(call, jnp.asarray(x, jnp.float32))
    assert_close(out, expected.detach().numpy(), "float32")
    assert there.grad is not None
    assert_close(pull(jnp.asarray(dout, jnp.float32))[0], there.grad.numpy(), "float32", "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_chunks_and_ties(platform):
    """The first of equal values takes the gradient of the largest, as PyTorch's on a CPU; chunks are a reshape."""
    x = np.random.default_rng(0).integers(-2, 3, (2, 12, 3, 5)).astype(np.float32)
    there = torch.tensor(x, requires_grad=True)
    expected = there.view(2, 3, 4, 3, 5).max(2).values
    expected.sum().backward()
    op = ejx.MeanPooling("max", chunk_size=4, platform=platform)
    call = lambda x: op(x.reshape(2, 12, 15)).reshape(2, 3, 3, 5)
    out, pull = jax.vjp(call, jnp.asarray(x))
    np.testing.assert_array_equal(out, expected.detach().numpy())
    assert there.grad is not None
    np.testing.assert_array_equal(pull(jnp.ones_like(out))[0], there.grad.numpy())
