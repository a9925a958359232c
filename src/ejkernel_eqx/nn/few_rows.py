"""Projections of few rows together with what surrounds them in a block: its norm before them, its residual behind. One launch each on GPUs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array

from ..matmul import Matmul
from .arguments import read_array
from .projection import are_multiplied, check_linear, in_dtype, mesh_of, project

Norm = eqx.nn.RMSNorm | eqx.nn.LayerNorm


class Block(NamedTuple):
    """The norm before a layer and the residual that is added behind it, where the layer computes them too."""

    norm: Norm | None = None
    residual: Any = None

    @property
    def is_alone(self) -> bool:
        """Returns whether the layer has neither."""
        return self.norm is None and self.residual is None


def check_block(block: Block, x: Array, features: int, kv_input: Any = None) -> None:
    """The norm and the residual of a call of a layer with so many features in its output."""
    if block.is_alone:
        return
    if block.norm is not None and (isinstance(block.norm, type) or not callable(block.norm)):
        raise ValueError(f"norm: expected an equinox.nn.RMSNorm or None, received {block.norm!r}.")
    if kv_input is not None:
        raise ValueError(
            "kv_input: expected None with norm or residual, received an array; they are for self attention in a block."
        )
    if block.residual is not None:
        residual = read_array("residual", block.residual, "floats", "[..., T, O]")
        expected = (*x.shape[:-1], features)
        if residual.shape != expected:
            raise ValueError(
                f"residual: expected the shape of the output, {expected}, received {residual.shape}."
            )


def with_residual(residual: Any, results: Any) -> Any:
    """The results of a layer, with the residual added to the first."""
    if residual is None:
        return results
    if not isinstance(results, tuple):
        return residual + laid_out_as(residual, results.astype(residual.dtype))
    return residual + laid_out_as(residual, results[0].astype(residual.dtype)), *results[1:]


def laid_out_as(residual: Array, branch: Array) -> Array:
    """The branch as the residual lies on an explicit mesh, whatever way the rows of its last projection are split."""
    sharding = jax.typeof(residual).sharding
    return jax.sharding.reshard(branch, sharding) if sharding.mesh.explicit_axes else branch


def normed(norm: Norm | None, x: Any) -> Array:
    """The norm over the last axis, in the dtype of `x`; without one, `x`."""
    if norm is None:
        return x
    over_last: Any = norm
    for _ in x.shape[:-1]:
        over_last = jax.vmap(over_last)
    return over_last(x)


def projected(
    matmul: Matmul, x: Array, norm: Norm | None, layers: Mapping[str, Any], widths: tuple[int, ...]
) -> tuple[Array, ...]:
    """Projections by name, of these widths, of the norm of `x`: `project` of each."""
    operands = _operands(x, norm, layers, widths)
    if operands is None:
        h = normed(norm, x)
        return tuple(project(name, layer, h, width) for (name, layer), width in zip(layers.items(), widths))
    weights, options = operands
    return matmul.together(x, *weights, **options)


def gated(matmul: Matmul, x: Array, norm: Norm | None, layers: Mapping[str, Any], width: int) -> Array | None:
    """The gate of two projections of this width of the norm of `x`; `None` if they cannot be computed together."""
    operands = _operands(x, norm, layers, (width, width))
    if operands is None:
        return None
    weights, options = operands
    return matmul(x, *weights, **options)


def added(matmul: Matmul, name: str, layer: Any, x: Array, residual: Array) -> Array:
    """The residual and the projection of `x` to its features."""
    features, same = residual.shape[-1], residual.dtype == x.dtype
    operands = _operands(x, None, {name: layer}, (features,)) if same else None
    if operands is None:
        return with_residual(residual, project(name, layer, x, features))
    weights, options = operands
    # On several devices apart: a mesh may split the contracted axis of a plain product, which is then a sum over devices.
    if jax.device_count() > 1:
        return residual + matmul(x, *weights, **options)
    return matmul(x, *weights, **options, residual=residual)


def _operands(
    x: Array, norm: Norm | None, layers: Mapping[str, Any], widths: tuple[int, ...]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The weights of projections of the norm of `x`, and the options of their `Matmul`; `None` if it does not compute them."""
    weights = [layer.weight for layer in layers.values() if type(layer) is eqx.nn.Linear]
    linear = len(weights) == len(layers) and all(w.ndim == 2 for w in weights)
    if not linear or not _is_plain(norm) or not are_multiplied(x, weights):
        return None
    if mesh_of((x, weights)) is not None:
        return None
    for (name, layer), width in zip(layers.items(), widths):
        check_linear(name, layer, x, width)
    options: dict[str, Any] = {"biases": [layer.bias for layer in layers.values()]}
    if norm is not None:
        options |= {"norm": True if norm.weight is None else norm.weight, "norm_eps": norm.eps}
    return [in_dtype(weight, x.dtype) for weight in weights], options


def plain_norms(q_norm: Any, k_norm: Any, over_all: bool) -> dict[str, Any] | None:
    """The norms of the heads as options of `RotaryHeads`; `None` if it does not compute them."""
    norms = (q_norm, k_norm)
    if norms == (None, None):
        return {}
    plain = not over_all and all(n is not None and n.weight is not None and _is_plain(n) for n in norms)
    if not plain or q_norm.eps != k_norm.eps:
        return None
    return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "norm_eps": q_norm.eps}


def _is_plain(norm: Any) -> bool:
    """Returns whether `Matmul` computes this norm; a user may have put another one in its place."""
    return norm is None or (type(norm) is eqx.nn.RMSNorm and norm.bias is None)
