"""Hopper's kernels for keys whose second part all heads share, without a Hopper: their own code, with threads for its warps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.spec import AttentionSpec
from ejkernel_eqx.latent.spec import LatentArrays
from tests.attention.dense import normal
from tests.attention.hopper import configured, HOPPER, needs_gluon, triton
from tests.attention.hopper_emulation import Device
from tests.compiled import executed
from tests.latent.cases import call_of, OPERATION, poison
from tests.tolerances import assert_close

KERNELS = ejx.kernel_registry.get(OPERATION, "triton").load()
CONFIG = configured(triton.TileConfig(128, 128, 4, 2, 0, 2), triton.TileConfig(64, 128, 4, 2, 0, 1))
CALLS: dict[str, Any] = {
    "causal": ((128, 64, 128), dict(T=150, S=280, right=0, offset=130), None),
    "segments": ((72, 32, 104), dict(T=150, S=150), np.repeat([0, 1, -1], 50)),
}


@needs_gluon
def test_where_they_are_chosen():
    *_, of = call_of(4096, heads=32)
    config, *others = KERNELS.candidates(of, HOPPER)
    assert config == KERNELS.default_config(of, HOPPER) and not KERNELS.remark(config, of, HOPPER)
    assert config.forward.hopper_programs == 132 and config.key_gradient.hopper_programs
    assert any(not other.forward.hopper_programs for other in others)
    assert all(KERNELS.config_unsupported(c, of, HOPPER) is None for c in (config, *others))
    dims = (
        (64, 32, 64),
        (64, 128, 64),
        (48, 72, 64),
    )  # the backward's first part has 128 channels, its second one 64
    for other in (
        call_of(4096, "bias"),
        call_of(4096, dtype="float32"),
        *(call_of(4096, dims=d) for d in dims),
    ):
        config = KERNELS.default_config(other[-1], HOPPER)
        assert not config.forward.hopper_programs and not config.key_gradient.hopper_programs
        assert "Triton's kernel, not Hopper's" in KERNELS.remark(config, other[-1], HOPPER)


@pytest.mark.parametrize("name", ["causal", pytest.param("segments", marks=pytest.mark.slow)])
def test_numbers(name):
    """Results and gradients; NaN in what is hidden changes nothing."""
    pytest.importorskip("ejkernel_eqx.attention.triton.hopper.backward_kernel", exc_type=ImportError)
    (nope, rope, values), sizes, ids = CALLS[name]
    sizes = dict(sizes)
    t, s, heads, dtype = sizes.pop("T"), sizes.pop("S"), 2, jnp.bfloat16
    spec = AttentionSpec((nope + rope) ** -0.5, same_segments=ids is not None, **sizes)
    given = dict(
        q=normal(0, 1, t, heads, nope + rope, dtype=dtype),
        k=normal(1, 1, s, heads, nope, dtype=dtype),
        k_rope=normal(2, 1, s, rope, dtype=dtype),
        v=normal(3, 1, s, heads, values, dtype=dtype),
    )
    segments = None if ids is None else jnp.asarray(ids, jnp.int32)[None]
    arrays = LatentArrays(**given, q_segments=segments, kv_segments=segments)
    dout = normal(4, 1, t, heads, values, dtype=dtype)
    dlse = normal(5, 1, heads, t)
    exact = arrays._replace(**{name: x.astype(jnp.float32) for name, x in given.items()})
    learned = {name: getattr(exact, name) for name in given}
    run = lambda learned: reference.attend(exact._replace(**learned).whole, spec)
    (out, lse), pull = jax.vjp(run, learned)
    if ids is not None:
        dlse = jnp.where(ids < 0, 0, dlse)
    (grads,) = pull((dout.astype(jnp.float32), dlse))

    def emulated(arrays: Any) -> Any:
        forward, backward = (executed(f, Device().run) for f in (KERNELS.forward, KERNELS.backward))
        results = forward(arrays, spec, CONFIG)
        return results, backward(arrays, spec, CONFIG, *results, dout, dlse)

    found = emulated(arrays)
    for name, x, y in zip(("out", "lse"), found[0], (out, lse), strict=True):
        assert_close(x, y, "bfloat16", name=name)
    for name, x in grads.items():
        assert_close(getattr(found[1], name), x, "bfloat16", "gradient", name=name)
    if ids is not None:
        hidden = jnp.asarray(ids < 0)[None]
        again = emulated(arrays._replace(**poison(given, hidden, hidden)))
        jax.tree.map(np.testing.assert_array_equal, found, again)
