"""Models that multiply many rows in float8: by weights in float8, or in training by weights of floats."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..dispatch import PlatformLike
from ..matmul import Float8Weight, GroupedMatmul, ScaledMatmul
from ..quantised.dequantise import is_quantised
from .moe.experts import Experts

_WEIGHTS = {eqx.nn.Linear: ("weight",), Experts: ("gate_proj", "up_proj", "down_proj")}


def with_float8_rows(
    model: Any,
    enabled: bool = True,
    *,
    where: Callable[[str], bool] | None = None,
    platform: PlatformLike | None = None,
) -> Any:
    """Lets linear layers and experts with weights in float8 multiply many rows in float8, by
    [`ejkernel_eqx.ScaledMatmul`][]. Prefill and training are then faster. Results are less exact, because rows are
    quantised, too. Up to 64 rows, as in decoding, are multiplied as before; by experts, up to 64 of each on average.
    Experts with biases are multiplied as before, too.

    ```python
    model = ejx.with_float8_rows(ejx.quantise(model, "fp8-block"))
    ```

    **Arguments:**

    - `model`: a model with weights in float8_e4m3fn: published so, or by [`ejkernel_eqx.quantise`][] with `"fp8"` or `"fp8-block"`.
    - `enabled`: `False` for a model that multiplies in its own dtype again.
    - `where`: `where(path)` says for each such weight whether it does; the path is as in [`ejkernel_eqx.quantise`][]. Default: all.
    - `platform`: that of each [`ejkernel_eqx.ScaledMatmul`][]; default by device and shapes.

    **Returns:** the model. The gradient of rows is that of a product without rounding; weights have none.

    **Raises:** `ValueError` for a model without such a weight, and as [`ejkernel_eqx.ScaledMatmul`][] for its platform.
    """
    kernel = ScaledMatmul(platform=platform) if enabled else None

    def changed(path: str, weight: Any, is_stacked: bool) -> Any:
        is_float8 = is_quantised(weight) and weight.format.element == "float8_e4m3fn"
        if not is_float8 or weight.format.block[1] % 128 or not (where is None or where(path)):
            return None
        return dataclasses.replace(weight, float8_rows=kernel)

    return _replaced(
        model,
        changed,
        "a weight in float8_e4m3fn, received none; quantise it first by ejx.quantise(model, 'fp8-block').",
    )


def refuse_float8(name: str, tree: Any, purpose: str) -> None:
    """Raises for a model of `with_float8_training`, whose weights are no floats; `purpose`: what to do with one of floats."""
    is_float8 = lambda x: isinstance(x, Float8Weight)
    if any(map(is_float8, jax.tree.leaves(tree, is_leaf=is_float8))):
        raise ValueError(
            f"{name}: expected weights of floats, received some of with_float8_training; {purpose} ejx.with_float8_training(model, False)."
        )


def with_float8_training(
    model: Any,
    enabled: bool = True,
    *,
    where: Callable[[str], bool] | None = None,
    platform: PlatformLike | None = None,
) -> Any:
    r"""Lets linear layers and experts multiply many rows in float8, in training too: the product, and the gradients of
    rows and weights. The weights stay floats, and optimisers see them as before. Scales are those of the numbers at hand.
    [`ejkernel_eqx.Float8Weight`][] has the equations.

    ```python
    model = ejx.with_float8_training(model)
    ```

    Up to 64 rows are multiplied in the dtype of the layer; by experts, up to 64 of each on average. So are experts with biases. A mesh may split
    rows, and parameters over the devices of rows. Each device then has the whole weight for a product. Features that are split, and experts on a
    mesh, are refused.

    **Arguments:**

    - `model`: a model, a layer or any pytree of them.
    - `enabled`: `False` for a model with plain arrays again, for example to save it in its published form.
    - `where`: `where(path)` says for each weight of a linear layer or of experts whether it does; the path is as in
        [`ejkernel_eqx.quantise`][]. Default: those with 128 inputs and 128 outputs or more, but for a head (`.head.weight`).
    - `platform`: of each [`ejkernel_eqx.ScaledMatmul`][] and [`ejkernel_eqx.GroupedMatmul`][]; default by device and shapes.

    **Returns:** the model.

    **Raises:** `ValueError` for a model without such a weight, for a call with split features, and as [`ejkernel_eqx.ScaledMatmul`][] for
    its platform.
    """
    kernel = ScaledMatmul(platform=platform)
    grouped = GroupedMatmul(transpose_rhs=True, platform=platform)

    def changed(path: str, weight: Any, is_stacked: bool) -> Any:
        if not enabled:
            is_chosen = isinstance(weight, Float8Weight) and (where is None or where(path))
            return weight.array if is_chosen else None
        array = weight.array if isinstance(weight, Float8Weight) else weight
        if is_quantised(array) or not eqx.is_inexact_array(array):
            return None
        by_default = min(array.shape[-2:]) >= 128 and not path.endswith(".head.weight")
        if not (by_default if where is None else where(path)):
            return None
        return Float8Weight(array, kernel, grouped if is_stacked else None)

    wanted = (
        "a weight of floats with 128 inputs and outputs or more, received none; where= may choose others."
    )
    return _replaced(model, changed, wanted if enabled else None)


def _replaced(model: Any, changed: Callable[[str, Any, bool], Any], expected: str | None) -> Any:
    """The model with the weights that `changed(path, weight, are_experts)` returns; those for which it returns `None` stay. It has some, unless
    nothing is `expected`."""
    count = 0

    def of_node(path: Any, node: Any) -> Any:
        nonlocal count
        for name in _WEIGHTS.get(type(node), ()):
            weight, is_stacked = getattr(node, name), not isinstance(node, eqx.nn.Linear)
            new = changed(f"{jax.tree_util.keystr(path)}.{name}", weight, is_stacked)
            if new is None:
                continue
            count += 1
            node = eqx.tree_at(
                lambda node, name=name: getattr(node, name), node, new, is_leaf=lambda x, old=weight: x is old
            )
        return node

    model = jax.tree_util.tree_map_with_path(of_node, model, is_leaf=lambda node: type(node) in _WEIGHTS)
    if not count and expected is not None:
        raise ValueError(f"model: expected a linear layer or experts with {expected}")
    return model
