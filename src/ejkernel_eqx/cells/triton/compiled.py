"""Platform `triton`: the host side. Support, and the launches of forward and backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, device_facts, DeviceFacts, FORWARD, Problem
from ...launch import given, Launcher, NOTHING, result
from ...launch.sizes import cdiv
from ..spec import CellArrays, CellSpec, GATES
from . import tile_sizes
from .backward_kernel import backward_kernel
from .forward_kernel import forward_kernel
from .persistent_backward_kernel import persistent_backward_kernel
from .persistent_forward_kernel import persistent_forward_kernel
from .rows import Rows, rows_of
from .tile_sizes import CellTile, TritonConfig

Named = dict[str, Any]

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
_KERNELS = {
    "forward": (forward_kernel, persistent_forward_kernel),
    "backward": (backward_kernel, persistent_backward_kernel),
}
"""The kernels of each pass: that of any tile, and the one with the weight on the chip."""
config_type = TritonConfig
unavailable = kernels_unavailable
default_config = tile_sizes.default_config
candidates = tile_sizes.candidates
config_unsupported = tile_sizes.config_unsupported


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    return None


def forward(arrays: CellArrays, spec: CellSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """`out` and the final states; with `save` the `cells [B, T, H]` of an LSTM after every token, and the `states` if they differ from `out`."""
    call = _Call("forward", arrays, spec, config)
    dtype, (batch, length, _), features = arrays.x.dtype, arrays.x.shape, call.features
    hidden, keeps = call.states(arrays.hidden), save and spec.cell == "lstm"
    narrow, by_token = hidden.astype(dtype), result(batch * length, features, dtype=dtype)
    outputs = {
        "hidden": hidden,
        "cell": call.cells(arrays.cell),
        "operand": jnp.stack([narrow, jnp.zeros_like(narrow)]),
        **call.arrived(),
        "out": by_token,
        "cells": by_token if keeps else NOTHING,
    }
    results = call.walk({"SAVE": keeps}, {}, outputs, call.rows.longest, lambda step: step[None])
    shape = (batch, length, features)
    out = {
        "out": call.rows.clear(results["out"], padding=True).reshape(shape),
        "final_hidden": call.final(results["hidden"]),
    }
    if spec.cell == "lstm":
        out["final_cell"] = call.final(results["cell"])
    if save and arrays.marks is not None:  # at padding, the state that passes
        out["states"] = results["out"].reshape(shape)
    return out | ({"cells": results["cells"].reshape(shape)} if keeps else {})


def backward(
    arrays: CellArrays,
    spec: CellSpec,
    config: TritonConfig,
    saved: Named,
    cotangents: Named,
) -> Named:
    """The gradient of every float array. The gates are recomputed by one product over all tokens, and the gradient of the weight is another."""
    call = _Call("backward", arrays, spec, config)
    x, longest, tokens = arrays.x, call.rows.longest, arrays.x.shape[0] * arrays.x.shape[1]
    flat = lambda a: a.reshape(tokens, a.shape[-1])
    initial = None if arrays.hidden is None else call.states(arrays.hidden)
    before = call.rows.before(flat(saved.get("states", saved["out"])), initial)
    is_gru, shared = spec.cell == "gru", tile_sizes.sharing(config.backward)
    gradients = result(tokens, x.shape[-1], dtype=x.dtype)
    outputs = {
        "dhidden": call.states(cotangents["final_hidden"]),
        "dcell": call.cells(cotangents.get("final_cell")),
        **call.arrived(),
        "dproduct": gradients,
        "dx": gradients if is_gru else NOTHING,
    }
    launches = 1
    if call.is_persistent:
        sums = result(call.programs, config.backward.block_m, shared * config.backward.block_n)
        outputs["operand"] = result(2, call.rows.count, x.shape[-1], dtype=x.dtype)
        outputs["partial"] = sums if shared > 1 else NOTHING
        launches = 2 if shared > 1 and not call.in_one_launch else 1
    inputs = {"gates": call.gates(flat(x), before), "states": before, "dout": flat(cotangents["out"])}
    cells = flat(saved["cells"]) if "cells" in saved else None
    inputs |= {"cells": cells, "initial": call.cells(arrays.cell)}
    numbers = {"PARTS": 1 if spec.cell == "rnn" else 4, "SHARED": shared, **given(INITIAL=arrays.cell)}
    told = lambda step: jnp.stack([jnp.asarray(longest, jnp.int32), step // launches, step % launches])
    results = call.walk(numbers, inputs, outputs, (longest + 1) * launches, told)
    dproduct = call.rows.clear(results["dproduct"])
    dx = call.rows.clear(results["dx"]) if is_gru else dproduct
    grads = {"x": dx.reshape(x.shape), "weight": _dot(dproduct, before, (0, 0), jnp.float32)}
    if arrays.bias is not None:
        grads["bias"] = jnp.sum(dproduct[:, 2 * call.features :].astype(jnp.float32), 0)
    for name, initial in (("hidden", arrays.hidden), ("cell", arrays.cell)):
        if initial is not None:
            grads[name] = results[f"d{name}"].reshape(initial.shape)
    return grads


def _dot(x: Array, y: Array, axes: tuple[int, int], dtype: Any) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=dtype
    )


class _Call:
    """One call: its rows, and the arguments that both kernels share."""

    def __init__(self, kernel: str, arrays: CellArrays, spec: CellSpec, config: TritonConfig):
        tile: CellTile = getattr(config, kernel)
        self.arrays, self.spec, self.tile = arrays, spec, tile
        self.features = arrays.weight.shape[-1]
        self.rows: Rows = rows_of(arrays)
        self.is_persistent = tile.form == "persistent"
        self.kernel, weight = _KERNELS[kernel][self.is_persistent], arrays.weight.astype(arrays.x.dtype)
        if self.kernel in (forward_kernel, persistent_backward_kernel):  # read it as `[H, G]`
            weight = jnp.swapaxes(weight, 0, 1)
        self.programs = tile_sizes.programs(kernel, self.rows.count, self.features, tile)
        # Programs that may not all run at the same time must not wait for each other; and what is given as `config=` may be of a larger device.
        at_once = min(config.concurrent_programs, device_facts().num_multiprocessors or self.programs)
        waits = self.is_persistent and self.programs <= at_once
        self.in_one_launch = tile.form == "whole" or waits
        numbers = {
            "R": self.rows.count,
            "H": self.features,
            "CELL": spec.cell,
            "GATES": GATES[spec.cell],
            "ACTIVATION": spec.activation,
            "GATE": spec.gate_activation,
            "MARKS": arrays.marks is not None,
            "PRECISION": config.float32_dot,
            "FAST": config.fast_sigmoid,
            "PER_STEP": tile.form == "per_step",
            "GRID_BARRIER": waits,
            "AHEAD": tile.num_stages,
            "EXACT": arrays.x.dtype == jnp.float32,
            **given(BIAS=arrays.bias),
        }
        named = {"x": arrays.x, "bias": arrays.bias, "marks": arrays.marks}
        named |= {"weight": weight, "bounds": self.rows.bounds, "step": None}
        self.launch = Launcher("cells", named, numbers, arrays.x)

    def states(self, x: Array | None) -> Array:
        """States as the kernels see them, `[R, H]` in float32."""
        shape = self.rows.count, self.features
        return jnp.zeros(shape, jnp.float32) if x is None else x.astype(jnp.float32).reshape(shape)

    def cells(self, x: Array | None) -> Array:
        """Cell states as the kernels see them; a single number if there are none."""
        return self.states(x) if self.spec.cell == "lstm" else jnp.zeros(1, jnp.float32)

    def arrived(self) -> Named:
        """Counters of arrivals, one for each barrier, each in a cache line of its own. A tile of rows has one for all its programs, then one for each
        group of programs that share columns."""
        if not self.is_persistent:
            return {}
        columns = cdiv(self.features, max(self.tile.block_n, tile_sizes.WIDTH))
        count = cdiv(self.rows.count, self.tile.block_m) * (columns + 1)
        return {"arrived": jnp.zeros((count, 32), jnp.int32)}

    def final(self, states: Array) -> Array:
        """Final states in the caller's layout."""
        batch = self.arrays.x.shape[0]
        shape = (batch, self.features) if self.arrays.offsets is None else (batch, -1, self.features)
        return states.reshape(shape).astype(self.spec.state_dtype)

    def gates(self, x: Array, before: Array) -> Array:
        """The arguments of the gates: sums of projected inputs and products; for n of a GRU, the two apart."""
        product = _dot(before, self.arrays.weight.astype(x.dtype), (1, 1), jnp.float32)
        wide = x.astype(jnp.float32)
        if self.spec.cell != "gru":
            return (wide + product).astype(x.dtype)
        sums, both = wide + product, 2 * self.features
        inner = product[:, both:]
        if self.arrays.bias is not None:
            inner = inner + self.arrays.bias.astype(jnp.float32)[None]
        return jnp.concatenate([sums[:, :both], wide[:, both:], inner], 1).astype(x.dtype)

    def walk(
        self, numbers: Named, inputs: Named, outputs: Named, steps: Any, told: Callable[[Array], Array]
    ) -> Named:
        """Launches the kernel once, or once per step; `told` is what a launch is told about its step. Outputs given as arrays start as these."""
        shapes = {name: result(*x.shape, dtype=x.dtype) for name, x in outputs.items()}
        started = {name: x for name, x in outputs.items() if isinstance(x, Array)}
        launch = self.launch.knowing(inputs, **numbers)

        def one(before: Named, step: Array | None) -> Named:
            arrays: Named = {f"{name}_before": before.get(name) for name in outputs} | {"step": step}
            aliases = {f"{name}_before": name for name in before}
            return launch(self.kernel, self.tile, shapes, self.programs, arrays, aliases=aliases)

        if self.in_one_launch:
            return one(started, None)
        # The outputs are carried from launch to launch, and written in place.
        carried = {name: started.get(name, jnp.zeros(x.shape, x.dtype)) for name, x in shapes.items()}
        body = lambda step, carried: one(carried, told(jnp.asarray(step, jnp.int32)))
        return jax.lax.fori_loop(0, steps, body, carried)


_TILE = CellTile(16, 32, 32, 4)
_PORTABLE = {"float32_dot": "ieee", "fast_sigmoid": False, "concurrent_programs": 0}
interpreted = Interpreted(__name__, TritonConfig(_TILE, _TILE), **_PORTABLE)
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
