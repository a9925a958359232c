"""Weights of whole models in 8 or 4 bits."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..quantised.dequantise import is_quantised
from ..quantised.quantise import error_of, format_for, quantised_array
from .float8_rows import refuse_float8
from .moe.experts import Experts

_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def quantise(
    tree: Any,
    kind: str,
    *,
    group_size: int | None = None,
    where: Callable[[str], bool] | None = None,
    return_errors: bool = False,
) -> Any:
    r"""Stores weights in 8 or 4 bits: each is rounded to the nearest code, with scales by the largest number of a block.

    ```python
    model = ejx.quantise(model, "int4")
    model, errors = ejx.quantise(model, "int8", return_errors=True)
    weight = ejx.quantise(array, "mxfp4")  # one weight, [..., out, in]
    ```

    | `kind` | codes | a scale for |
    |---|---|---|
    | `"int8"` | int8 | an output channel, float32 |
    | `"fp8"` | float8_e4m3fn | an output channel, float32 |
    | `"fp8-block"` | float8_e4m3fn | 128 x 128, float32 |
    | `"int4"` | 4 bits, -8 to 7 | `group_size` inputs, bfloat16 |
    | `"mxfp4"` | float4_e2m1fn | 32 inputs, a power of two (OCP Microscaling) |
    | `"nvfp4"` | float4_e2m1fn | 16 inputs, float8_e4m3fn, and a float32 of the whole weight |

    **Arguments:**

    - `tree`: an array `[..., out, in]` of floats, or a model.
    - `group_size`: of `"int4"`: 128, 64 or 32; default the largest that divides the inputs.
    - `where`: for a model, `where(path)` says whether the weight at a path such as `".stacks[0][0].mixer.q_proj.weight"` is quantised. It is
      asked for each float array of two axes and more, but for norms and biases. Default: the weights of each `equinox.nn.Linear` and of experts,
      but for those of a head (`.head.weight`). Norms, routers, biases and embeddings stay as they are.
    - `return_errors`: whether to return, too, the error of each weight: the root mean square of the difference over that of the weight.

    **Returns:** a [`ejkernel_eqx.QuantizedWeight`][], or the model with such weights. With `return_errors`, a tuple of
    it and a dictionary from paths to errors. The path of an array is `""`.

    **Raises:** `ValueError` for an unknown kind, inputs that groups do not divide, NaN or infinities, a model without any weight to
        quantise, and one of [`ejkernel_eqx.with_float8_training`][].
    """
    paths, errors = _paths(tree, where), {}

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name not in paths:
            return leaf
        try:
            new = quantised_array(jnp.asarray(leaf), format_for(kind, leaf.shape[-1], group_size))
        except ValueError as error:
            raise ValueError(f"{name or 'tree'}: {error}") from None
        if return_errors:
            errors[name] = float(error_of(jnp.asarray(leaf), new))
        return new

    new = jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_quantised)
    return (new, errors) if return_errors else new


def _paths(tree: Any, where: Callable[[str], bool] | None) -> set[str]:
    """The paths of the weights to quantise."""
    if eqx.is_array_like(tree) or hasattr(tree, "__array__"):
        if getattr(tree, "ndim", 0) < 2 or not jnp.issubdtype(tree.dtype, jnp.floating):
            raise ValueError(
                f"tree: expected floats [..., out, in] or a model, received {getattr(tree, 'dtype', type(tree).__name__)} of shape "
                f"{getattr(tree, 'shape', ())}."
            )
        return {""}
    refuse_float8("tree", tree, "quantise")
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised)
    arrays = {
        jax.tree_util.keystr(path): x
        for path, x in leaves
        if eqx.is_inexact_array(x) and not is_quantised(x) and x.ndim >= 2
    }
    weights, others = _weights(tree)
    if where is None:
        chosen = {path for path in weights & arrays.keys() if not path.endswith(".head.weight")}
    else:
        chosen = {path for path in arrays if path not in others and where(path)}
    if not chosen:
        raise ValueError(
            "tree: expected a model with weights to quantise, received none; where= may choose others."
        )
    return chosen


def _weights(tree: Any) -> tuple[set[str], set[str]]:
    """The paths of weights of linear layers and of experts, and those of biases beside them and of norms, which take floats."""
    fields = {eqx.nn.Linear: ("weight",), Experts: _EXPERTS, eqx.nn.RMSNorm: (), eqx.nn.LayerNorm: ()}
    owns = lambda node: isinstance(node, tuple(fields))
    weights, others = set[str](), set[str]()
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=owns):
        name = jax.tree_util.keystr(path)
        of_node = next((names for kind, names in fields.items() if isinstance(node, kind)), ())
        weights |= {f"{name}.{field}" for field in of_node}
        if owns(node):
            others |= {
                name + jax.tree_util.keystr(part) for part, _ in jax.tree_util.tree_leaves_with_path(node)
            }
    return weights, others - weights
