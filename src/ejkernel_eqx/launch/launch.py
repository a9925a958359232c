"""`Launch`, the complete description of one kernel launch."""

import dataclasses
import itertools
import math
from typing import Any

import jax

# Parameters of `jax_triton.triton_call` itself; a kernel constant of the same name could not be passed.
_RESERVED_NAMES = frozenset(
    "kernel out_shape out_type grid name custom_call_target_name num_warps num_stages num_ctas compute_capability "
    "enable_fp_fusion backend_options input_output_aliases zeroed_outputs debug serialized_metadata cost_estimate "
    "has_side_effect".split()
)

_MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The description of one launch of a Triton kernel, by host metadata only.

    The kernel's parameters have this order: array inputs and run-time integers (in any mix), then array
    outputs, then compile-time constants. The dictionaries below contain each of them exactly once.

    **Arguments:**

    - `kernel`: a Triton `JITFunction`, or an autotune or heuristics wrapper of one, which is removed, because the
        configuration comes from the launch.
    - `inputs`, `outputs`: maps kernel parameters to shapes and dtypes. Outputs are new buffers, except for those in `aliases`.
    - `scalars`: run-time integers. A `bool` is passed as 0 or 1, and jax-triton passes 1 as a compile-time constant.
        Floats belong in `constants`, because jax-triton 0.3 would pass them as float64.
    - `constants`: the `tl.constexpr` parameters.
    - `grid`: one to three extents; a GPU supports at most 2**31 - 1, 65,535 and 65,535.
    - `num_warps`, `num_stages`: compiler options.
    - `max_registers`: maximum number of registers per thread, so that more programs run concurrently; 0 leaves it to the
        compiler. Only has an effect if `limits_registers(device)`.
    - `name`: the label in HLO and profilers; by default the kernel's own name.
    - `aliases`: maps input names to output names of equal shape and dtype. The output starts with the input's content.
        It is in the input's own buffer if nothing else needs that buffer (a donated argument, the carry of a loop),
        otherwise in a copy. It is never shared with another input, even if both are the same array. The kernel loads
        and stores through the output's parameter, which comes before those of other outputs; the input's parameter must
        exist but not be used.

    **Raises:** `ValueError` if names, order or types do not fit the kernel.
    """

    kernel: Any
    inputs: dict[str, jax.ShapeDtypeStruct]
    outputs: dict[str, jax.ShapeDtypeStruct]
    scalars: dict[str, int]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0
    name: str = ""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not hasattr(self.kernel, "fn"):
            raise ValueError(f"Launch: kernel must be a Triton `JITFunction`, got {self.kernel!r}.")
        _check_names(self)
        _check_values(self)
        if self.aliases:
            _check_aliases(self)
        # jax-triton has a type for bools that Triton 3.7 does not support.
        object.__setattr__(self, "scalars", {name: int(value) for name, value in self.scalars.items()})

    @property
    def function(self) -> Any:
        """The `JITFunction` below any autotune or heuristics wrapper."""
        function = self.kernel
        while hasattr(function.fn, "fn"):
            function = function.fn
        return function

    @property
    def is_gluon(self) -> bool:
        """Returns whether the kernel is written in Gluon."""
        return bool(getattr(self.function, "is_gluon", bool)())

    @property
    def label(self) -> str:
        return self.name or self.function.fn.__name__

    @property
    def arguments(self) -> tuple[str, ...]:
        """The inputs and scalars, in the kernel's order."""
        given = self.inputs.keys() | self.scalars.keys()
        return tuple([name for name in self.function.arg_names if name in given])

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs, in the kernel's order."""
        return tuple([name for name in self.function.arg_names if name in self.outputs])

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to launch: no program, or no output element."""
        return 0 in self.grid or not any([math.prod(out.shape) for out in self.outputs.values()])


def _check_names(launch: Launch) -> None:
    groups = {
        "inputs": launch.inputs,
        "scalars": launch.scalars,
        "outputs": launch.outputs,
        "constants": launch.constants,
    }
    label, parameters = launch.label, list(launch.function.arg_names)
    owner: dict[str, str] = {}
    for group, members in groups.items():
        for name in members:
            if name in owner:
                raise ValueError(f"Launch of {label}: {name!r} is given in both {owner[name]} and {group}.")
            owner[name] = group
    if unknown := [name for name in owner if name not in parameters]:
        raise ValueError(
            f"Launch of {label}: {unknown} are not parameters of the kernel; its parameters are {parameters}."
        )
    if missing := [name for name in parameters if name not in owner]:
        raise ValueError(f"Launch of {label}: the kernel's parameters {missing} are missing.")
    rank = {"inputs": 0, "scalars": 0, "outputs": 1, "constants": 2}
    for before, after in itertools.pairwise(parameters):
        if rank[owner[before]] > rank[owner[after]]:
            raise ValueError(
                f"Launch of {label}: the kernel must take inputs and scalars first, then outputs, then constants, "
                f"but {before!r} ({owner[before]}) comes before {after!r} ({owner[after]})."
            )
    for parameter in launch.function.params:
        if parameter.is_constexpr != (owner[parameter.name] == "constants"):
            kind = "is" if parameter.is_constexpr else "is not"
            raise ValueError(
                f"Launch of {label}: {parameter.name!r} {kind} annotated `tl.constexpr` in the kernel, "
                f"but given in {owner[parameter.name]}."
            )
    by_name = [*launch.constants, *launch.aliases.values()]
    if reserved := [name for name in by_name if name in _RESERVED_NAMES]:
        raise ValueError(f"Launch of {label}: {reserved} are names of launch options; rename the parameters.")


def _check_values(launch: Launch) -> None:
    label = launch.label
    if not launch.outputs:
        raise ValueError(f"Launch of {label}: a kernel needs at least one output.")
    for name, value in launch.scalars.items():
        if not isinstance(value, int):
            raise ValueError(
                f"Launch of {label}: scalar {name!r} must be an int or a bool, got {value!r} of type "
                f"{type(value).__name__}. Pass a float as a constant (`tl.constexpr`) instead."
            )
    if not 1 <= len(launch.grid) <= 3 or [n for n in launch.grid if not isinstance(n, int) or n < 0]:
        raise ValueError(f"Launch of {label}: grid must be one to three extents >= 0, got {launch.grid}.")
    if [n for n, most in zip(launch.grid, _MOST_PROGRAMS, strict=False) if n > most]:
        raise ValueError(
            f"Launch of {label}: grid must be at most {_MOST_PROGRAMS}, the limits of a GPU, got {launch.grid}; put long "
            "extents on the first axis."
        )
    if launch.num_warps < 1 or launch.num_warps & (launch.num_warps - 1):
        raise ValueError(f"Launch of {label}: num_warps must be a power of two, got {launch.num_warps}.")
    if launch.num_stages < 1:
        raise ValueError(f"Launch of {label}: num_stages must be at least 1, got {launch.num_stages}.")


def _check_aliases(launch: Launch) -> None:
    label = launch.label
    if len(set(launch.aliases.values())) != len(launch.aliases):
        raise ValueError(f"Launch of {label}: aliases must name each output once, got {launch.aliases}.")
    aliased = [name in launch.aliases.values() for name in launch.results]
    if aliased != sorted(aliased, reverse=True):
        raise ValueError(
            f"Launch of {label}: the kernel must take aliased outputs before others, got {launch.results}, of which "
            f"{list(launch.aliases.values())} are aliased."
        )
    for source, result in launch.aliases.items():
        if source not in launch.inputs or result not in launch.outputs:
            raise ValueError(
                f"Launch of {label}: aliases must name inputs and their outputs, got {source!r}: {result!r}."
            )
        given, made = launch.inputs[source], launch.outputs[result]
        if tuple(given.shape) != tuple(made.shape) or given.dtype != made.dtype:
            raise ValueError(
                f"Launch of {label}: {source!r} and its alias {result!r} must have one shape and dtype, got "
                f"{given.dtype} {tuple(given.shape)} and {made.dtype} {tuple(made.shape)}."
            )
