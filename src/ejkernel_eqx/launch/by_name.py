"""Launches: `run` performs one, on a GPU or interpreted; `Launcher` describes those of a family's kernels, with arguments matched to parameters
by name."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..parallel import match_varying
from .compile import TARGETS
from .launch import Launch
from .own_call import own_call, own_target
from .triton_call import triton_call

LOG2E = 1.4426950408889634
"""Kernels use powers of two: the factor for exponents of `e`."""

MOST_NATURAL = 2.3e38
"""The largest exponent of `e` that is a finite float32 as one of 2. Kernels take larger finite ones to be this large."""

executing: Any = jax.make_user_context(None)
"""`executing(execute)` is a context in which every launch is left to `execute(launch, arrays)`, which interprets or records it. A platform opens it
round its own host functions, never round a user's code. It holds for one thread, and is part of the key of JAX's caches of traces."""

Arrays = Mapping[str, Any]
"""Arrays by name, without `_ptr`; `None` if a call does not have one."""


def result(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's output, float32 by default."""
    return jax.ShapeDtypeStruct(shape, dtype)


def result_like(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an output like an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


NOTHING = result(1)
"""An output that a kernel does not write."""


def given(**arrays: Array | None) -> dict[str, bool]:
    """Constants that tell which arrays a call has."""
    return {name: x is not None for name, x in arrays.items()}


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiler options, for tiles that do not specify them."""

    num_warps: int
    num_stages: int = 2
    max_registers: int = 0


_OPTIONS = Options.__annotations__.keys()


@dataclasses.dataclass(frozen=True, eq=False)
class Launcher:
    """Launches the kernels of one call. A kernel's parameter `x_ptr` is the array `x`, `BLOCK_K` is the tile's field `block_k`, and any
    other parameter is a number (a compile-time constant if the kernel declares it so).

    - `family`: the package part of the kernels' labels.
    - `arrays`, `numbers`: available to every kernel. An array that the call does not have is `None`; it is never read, and `absent`
        stands in for it.
    """

    family: str
    arrays: Arrays
    numbers: Mapping[str, Any]
    absent: Any

    def knowing(self, arrays: Arrays, **numbers: Any) -> "Launcher":
        """The same launcher with more arrays and numbers for every kernel."""
        return dataclasses.replace(
            self, arrays={**self.arrays, **arrays}, numbers={**self.numbers, **numbers}
        )

    def __call__(
        self,
        kernel: Any,
        tile: Any,
        outputs: Mapping[str, jax.ShapeDtypeStruct],
        programs: int,
        arrays: Arrays | None = None,
        **more: Any,
    ) -> dict[str, Array]:
        """Launches `kernel` and returns its outputs by name.

        **Arguments:**

        - `tile`: a dataclass with `num_warps` and optionally the other `Options`.
        - `outputs`: names without `_ptr`, as all names of arrays here.
        - `programs`: their number, along one axis, because the other axes of a GPU's grid end at 65,535.
        - `arrays`: arrays for this launch only.
        - `more`: numbers for this launch only; and `aliases`, input to output, and `name`, if the label is not the kernel's name.
        """
        launch, inputs = self.launch(kernel, tile, outputs, programs, arrays, **more)
        return {name.removesuffix("_ptr"): x for name, x in run(launch, inputs).items()}

    def launch(
        self,
        kernel: Any,
        tile: Any,
        outputs: Mapping[str, jax.ShapeDtypeStruct],
        programs: int,
        arrays: Arrays | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        name: str = "",
        **numbers: Any,
    ) -> tuple[Launch, dict[str, Any]]:
        """The launch that a call performs, and its inputs. Shapes may stand in for arrays."""
        arrays = {**self.arrays, **(arrays or {})}
        known = {**self.numbers, **{name.upper(): value for name, value in vars(tile).items()}, **numbers}
        inputs: dict[str, Any] = {}
        scalars, constants = {}, {}
        for parameter in kernel.params:
            array, pointer, _ = parameter.name.rpartition("_ptr")
            if parameter.name in known:
                (constants if parameter.is_constexpr else scalars)[parameter.name] = known[parameter.name]
            elif pointer and array in arrays and array not in outputs:
                x = arrays[array]
                inputs[parameter.name] = self.absent if x is None else x
        unnamed = numbers.keys() - scalars.keys() - constants.keys()
        assert not unnamed, f"{kernel.fn.__name__} has no parameters {sorted(unnamed)}"
        launch = Launch(
            kernel=kernel,
            inputs={name: result_like(x) for name, x in inputs.items()},
            outputs={f"{name}_ptr": x for name, x in outputs.items()},
            scalars=scalars,
            constants=constants,
            grid=(programs,),
            **{name: value for name, value in vars(tile).items() if name in _OPTIONS},
            name=f"ejkernel_eqx.{self.family}.{name or kernel.fn.__name__}",
            aliases={f"{x}_ptr": f"{y}_ptr" for x, y in (aliases or {}).items()},
        )
        return launch, inputs


def run(launch: Launch, arrays: Mapping[str, jax.Array], *, interpret: bool = False) -> dict[str, jax.Array]:
    """Launch the kernel on `arrays` and return its outputs by name.

    **Arguments:**

    - `launch`: the description of the launch.
    - `arrays`: one array per entry of `launch.inputs`. For an optional input that the constants disable, any array that
        matches `launch.inputs` will do.
    - `interpret`: run the same kernel on the CPU, slowly, with checked memory accesses. Outputs are then initialised with
        `poison` values, which reveals elements that the kernel does not write.

    **Returns:** a dictionary from output names to arrays. An empty launch returns zeros, and aliased arrays unchanged. Inside `jax.shard_map`
    the outputs vary over all mesh axes that any input varies over.

    There is no `vmap` or autodiff rule here: callers fold batches and define derivatives (`core/kind.py`).
    """
    if executing.value is not None and not interpret:
        return executing.value(launch, arrays)
    checked = _checked_arrays(launch, arrays)
    if interpret and launch.is_gluon:
        raise ValueError(
            f"run of {launch.label}: a kernel in Gluon cannot be interpreted; use a configuration without Hopper's kernels."
        )
    if launch.is_empty:
        given = {result: checked[source] for source, result in launch.aliases.items()}
        outputs = [
            given[name]
            if name in given
            else jnp.zeros(launch.outputs[name].shape, launch.outputs[name].dtype)
            for name in launch.results
        ]
    elif interpret:
        # It imports this package, and is of no use to those who launch.
        outputs = importlib.import_module("ejkernel_eqx.testing.interpret").interpret_call(launch, checked)
    elif launch.is_gluon:
        outputs = own_call(launch, checked, TARGETS["sm_90"])
    elif (target := own_target()) is not None:
        outputs = own_call(launch, checked, target)
    else:
        outputs = triton_call(launch, checked)
    return match_varying(dict(zip(launch.results, outputs, strict=True)), list(checked.values()))


def _checked_arrays(launch: Launch, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    if arrays.keys() != launch.inputs.keys():
        raise ValueError(
            f"run of {launch.label}: expected the arrays {sorted(launch.inputs)}, got {sorted(arrays)}."
        )
    checked = {name: jnp.asarray(arrays[name]) for name in launch.arguments if name in arrays}
    for name, array in checked.items():
        expected = launch.inputs[name]
        if array.shape != tuple(expected.shape) or array.dtype != expected.dtype:
            raise ValueError(
                f"run of {launch.label}: {name!r} must have shape {tuple(expected.shape)} and dtype "
                f"{expected.dtype}, got {array.shape} and {array.dtype}."
            )
    return checked
