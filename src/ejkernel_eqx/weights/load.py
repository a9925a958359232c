"""`load_published`: fills a layer or a model with the weights of a published one."""

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
    """Fills a layer or a model with published weights.

    The published names are those of its fields, or those of another published form of the same layer.

    Every float array of the layer must be published with the same shape, and no published array may be left over. So if the published layer has
    norms, sinks or biases and `like` was built without them, there is an error. A layer is never filled in part.

    **Arguments:**

    - `like`: a layer or any pytree of layers, for example from `from_config`. Its float values are not used, so `equinox.filter_eval_shape` may build
        it without memory. Its integer arrays stay as they are.
    - `state_dict`: a dictionary of arrays of NumPy, JAX or PyTorch; or the path of a `.safetensors`
        file, of the index of several (`model.safetensors.index.json`), or of a folder with either. Files are read
        one array at a time.
    - `prefix`: the beginning of the names of this layer, such as `"model.layers.0.self_attn"`, with or without a dot at the end.
    - `unit_offset_norms`: whether the RMS norms of the model multiply by `1 + weight` (Gemma, Qwen3-Next). One is then added to their weights. Gated
        norms (`GatedRMSNorm`) are never published so.
    - `ignore`: patterns of `fnmatch` for names under the prefix that are not wanted. Buffers that are computed here need no pattern.
    - `dtype`: the dtype of all float arrays; by default each keeps that in `like`.
    - `dequantise`: whether quantised weights become floats, as in [`ejkernel_eqx.models.from_pretrained`][]. Files are quantised if the
        `config.json` beside them has a `quantization_config`.

    **Returns:** a module like `like` with published arrays. Each is placed as the array in `like`, if that was placed explicitly.

    **Raises:** `CheckpointError`, which is a `ValueError`, if names are missing or left over, if a shape differs, or if a file is damaged. The
    message lists names that are similar to the missing ones, and says whether a shape is the transpose.
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
        # A shape is enough, since the values of `like` are never used. An explicit sharding stays.
        return jax.ShapeDtypeStruct(leaf.shape, found, sharding=sharding_of(leaf))

    return jax.tree.map(cast, like)


def _check_filled(filled: Any, like: Any) -> None:
    """Checks that every parameter was replaced by one of the same shape and dtype, and that every other array has values."""
    leaves = jax.tree_util.tree_leaves_with_path(filled, is_leaf=is_quantised)
    for (path, new), old in zip(leaves, jax.tree.leaves(like)):
        name = f"like{jax.tree_util.keystr(path)}"
        if isinstance(new, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{name}: expected an array, received only the shape of one, and no published array gives its values; build the layer outside of "
                "equinox.filter_eval_shape."
            )
        # If it is still the same object, no published array was taken for it.
        if is_parameter(new) and new is old:
            raise CheckpointError(
                f"{name}: expected a published array, received the one of like; the method _published of its module has to take it."
            )
        if (is_parameter(new) or is_quantised(new)) and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CheckpointError(
                f"{name}: expected {old.dtype} of shape {old.shape}, received {new.dtype} of shape {new.shape} from the method _published of its "
                "module; build the layer with the sizes of the published one (from_config does)."
            )
