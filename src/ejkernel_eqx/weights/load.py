"""`load_published`: a layer or a model with the weights of a published one."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._errors import CheckpointError
from ..quantised.dequantise import is_quantised
from .fill import fill, is_parameter, sharding_of
from .source import StateDict
from .view import Weights

M = TypeVar("M")
_BUFFERS = ("rotary_emb.inv_freq", "*.rotary_emb.inv_freq")


def load_published(
    like: M,
    state_dict: StateDict,
    prefix: str = "",
    *,
    unit_offset_norms: bool = False,
    ignore: Sequence[str] = (),
    dtype: Any = None,
    dequantise: bool | Sequence[str] = False,
) -> M:
    """A layer or a model with published weights: those of its fields' names, and the forms that other code publishes the same layer in.

    Every array of floats has to be there, with its shape, and nothing may be left over. So a layer that was built
    without the norms, sinks or biases of the published one is refused, not filled in part.

    **Arguments:**

    - `like`: a layer or any pytree of layers, for example from `from_config`. Its values are not used: `equinox.filter_eval_shape` builds it
        without memory. Integer arrays in it stay as they are.
    - `state_dict`: a dictionary of arrays of NumPy, JAX or PyTorch, or a path. The path is that of a `.safetensors`
        file, of the index of a sharded one (`model.safetensors.index.json`), or of a folder with either. Files are read
        one array at a time.
    - `prefix`: what stands before the names of this layer, `"model.layers.0.self_attn"`, with or without the last dot.
    - `unit_offset_norms`: whether the model multiplies by `1 + weight` in its RMS norms (Gemma, Qwen3-Next): one is added. Gated norms
        (`GatedRMSNorm`) are never published so.
    - `ignore`: names under the prefix that are not wanted, as patterns of `fnmatch`. Buffers that are computed here need not be named.
    - `dtype`: of all arrays of floats; by default each has that of its counterpart in `like`.
    - `dequantise`: of files whose `config.json` beside them has a `quantization_config`, as in [`ejkernel_eqx.models.from_pretrained`][].

    **Returns:** a module like `like`, filled. An array whose counterpart was placed explicitly (sharded, say) is placed the same way.

    **Raises:** `CheckpointError`, which is a `ValueError`, if names are missing or left over, a shape differs from that
    of the layer, or a file is damaged. It lists similar names beside the missing ones, and says whether a shape is the
    transpose.
    """
    _check(prefix, unit_offset_norms, ignore)
    like = like if dtype is None else _as_dtype(like, dtype)
    options: Any = {"unit_offset_norms": unit_offset_norms, "dequantise": dequantise}
    return loaded(like, Weights.open(state_dict, prefix, **options), ignore)


def loaded(like: M, weights: Weights, ignore: Sequence[str]) -> M:
    """`load_published` from a view of arrays."""
    filled = fill(like, weights)
    weights.skip(*_BUFFERS)
    weights.skip(*(pattern.removeprefix(weights.prefix) for pattern in ignore))
    weights.check()
    _check_filled(filled, like)
    return filled


def _check(prefix: Any, unit_offset_norms: Any, ignore: Any) -> None:
    if not isinstance(prefix, str):
        raise ValueError(
            f"prefix: expected text, received {prefix!r}; 'model.layers.0.self_attn' is that of a layer."
        )
    if not isinstance(unit_offset_norms, bool):
        raise ValueError(
            f"unit_offset_norms: expected True or False, received {unit_offset_norms!r}; True for Gemma and Qwen3-Next."
        )
    if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
        raise ValueError(
            f"ignore: expected a sequence of patterns, received {ignore!r}; ['*.inv_freq'] is one."
        )


def _as_dtype(like: Any, dtype: Any) -> Any:
    found = jnp.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"dtype: expected a floating dtype or None, received {found.name!r}; jnp.bfloat16, say."
        )
    if found == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype: expected 64-bit types to be enabled for float64; set jax_enable_x64, or take float32."
        )

    def cast(leaf: Any) -> Any:
        if not is_parameter(leaf):
            return leaf
        # A shape suffices, as values of `like` are never used; an explicit sharding stays.
        return jax.ShapeDtypeStruct(leaf.shape, found, sharding=sharding_of(leaf))

    return jax.tree.map(cast, like)


def _check_filled(filled: Any, like: Any) -> None:
    """Every parameter is new and of the form of its counterpart, and every other array is one."""
    leaves = jax.tree_util.tree_leaves_with_path(filled, is_leaf=is_quantised)
    for (path, new), old in zip(leaves, jax.tree.leaves(like)):
        name = f"like{jax.tree_util.keystr(path)}"
        if isinstance(new, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{name}: expected an array, received only the shape of one, and no published array gives its values; build the layer outside of "
                "equinox.filter_eval_shape."
            )
        # The same object means that nothing was taken for it.
        if is_parameter(new) and new is old:
            raise CheckpointError(
                f"{name}: expected a published array, received the one of like; the method _published of its module has to take it."
            )
        if (is_parameter(new) or is_quantised(new)) and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CheckpointError(
                f"{name}: expected {old.dtype} of shape {old.shape}, received {new.dtype} of shape {new.shape} from the method _published of its "
                "module; build the layer with the sizes of the published one (from_config does)."
            )
