"""Models whose float8 weights multiply many rows in float8."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..dispatch import PlatformLike
from ..matmul import ScaledMatmul
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
    changed, kernel = 0, ScaledMatmul(platform=platform) if enabled else None

    def of_node(path: Any, node: Any) -> Any:
        nonlocal changed
        for name in _WEIGHTS.get(type(node), ()):
            weight: Any = getattr(node, name)
            is_float8 = is_quantised(weight) and weight.format.element == "float8_e4m3fn"
            if not is_float8 or weight.format.block[1] % 128:
                continue
            if where is not None and not where(f"{jax.tree_util.keystr(path)}.{name}"):
                continue
            changed += 1
            weight = dataclasses.replace(weight, float8_rows=kernel)
            node = eqx.tree_at(
                lambda node, name=name: getattr(node, name), node, weight, is_leaf=is_quantised
            )
        return node

    model = jax.tree_util.tree_map_with_path(of_node, model, is_leaf=lambda node: type(node) in _WEIGHTS)
    if not changed:
        raise ValueError(
            "model: expected a linear layer or experts with a weight in float8_e4m3fn, received none; quantise it first by "
            "ejx.quantise(model, 'fp8-block')."
        )
    return model
