"""The tuner's view of a user's kernel, derived from its declaration, reference and hooks."""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import TuningError
from .._kernel import make_plan
from .._tolerances import Tolerance, TOLERANCES
from ..core.workload import bytes_of, launches_of
from ..dispatch import BOTH, Cost, FORWARD, Implementation, kernel_registry, Part, Platform, Problem, Workload
from ..parallel import wide
from .core import evaluate, fixed_plan, reference
from .declaration import Arrays, check_arrays, Declaration, Declared, Fields, is_float

Inputs = dict[str, Arrays]
"""`arrays` and the `cotangents` of the float outputs."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One problem of a user's kernel on one implementation."""

    implementation: Implementation
    problem: Problem

    @property
    def kernel(self) -> Any:
        """The class."""
        return self.implementation.load().kernel

    @property
    def declaration(self) -> Declaration:
        return self.kernel.declaration

    @functools.cached_property
    def input_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        dtypes = dict(self.problem.dtypes)
        return {d.name: self._shape(d, dtypes[d.name]) for d in self.declaration.inputs}

    @functools.cached_property
    def output_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        of, dtypes = self.declaration, dict(self.problem.dtypes)
        return {d.name: self._shape(d, of.output_dtype(d, dtypes)) for d in of.outputs}

    @property
    def cotangent_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: x for name, x in self.output_shapes.items() if is_float(x.dtype)}

    def _shape(self, declared: Declared, dtype: Any) -> jax.ShapeDtypeStruct:
        dims = dict(self.problem.dims)
        return jax.ShapeDtypeStruct(declared.shape(dims, (dims["B"],)), jnp.dtype(dtype))

    @property
    def learned(self) -> tuple[str, ...]:
        return tuple(name for name, x in self.input_shapes.items() if is_float(x.dtype))

    def make_inputs(self, seed: int) -> Inputs:
        """Normal random numbers, replaced by those that the class's `example_inputs` returns."""
        key = jax.random.key(seed)
        kernel = self.kernel._of_fields(self.problem.flags)
        arrays = dict(kernel.example_inputs(self.problem, jax.random.fold_in(key, 0)))
        wanted = {name: x for name, x in self.input_shapes.items() if name not in arrays}
        if fixed := [name for name, x in wanted.items() if not is_float(x.dtype)]:
            raise TuningError(
                f"{self.problem.operation}: random numbers are not representative for {', '.join(fixed)}; return "
                f"{'it' if len(fixed) == 1 else 'them'} from {self.kernel.__name__}.example_inputs(problem, key)."
            )
        arrays = check_arrays(self.declaration, arrays | _normal(wanted, key))
        made = self.declaration.problem(arrays, self.problem.flags)
        if made != self.problem:
            raise TuningError(
                f"{self.kernel.__name__}.example_inputs: expected inputs of {self.problem}, received inputs of {made}."
            )
        return {"arrays": arrays, "cotangents": _normal(self.cotangent_shapes, key)}

    def run(self, inputs: Inputs, config: Any) -> dict[str, Array]:
        plan = make_plan(self.problem.operation, platform=self.implementation.platform, config=config)
        kernel = self.kernel._of_fields(self.problem.flags, fixed_plan(plan, self.implementation))
        return self._results(functools.partial(evaluate, kernel, self.problem.flags), inputs)

    def reference(self, inputs: Inputs) -> dict[str, Array]:
        kernel = self.kernel._of_fields(self.problem.flags)
        return self._results(functools.partial(reference, kernel), jax.tree.map(wide, inputs))

    def _results(self, function: Any, inputs: Inputs) -> dict[str, Array]:
        """Outputs, and the gradients of the sum of all outputs weighted by their cotangents."""
        arrays, cotangents = inputs["arrays"], inputs["cotangents"]

        def differentiable(learned: Arrays) -> tuple[Arrays, Arrays]:
            outputs = function({**arrays, **learned})
            return {name: outputs[name] for name in cotangents}, outputs

        results, pull, outputs = jax.vjp(differentiable, {n: arrays[n] for n in self.learned}, has_aux=True)
        matching = {name: cotangents[name].astype(x.dtype) for name, x in results.items()}
        return outputs | {gradient_name(name): g for name, g in pull(matching)[0].items()}

    def tolerances(self) -> dict[str, Tolerance]:
        """Tolerances by the coarsest dtype among the result and the float inputs that it is computed from."""
        inputs = [self.input_shapes[name].dtype for name in self.learned]
        outputs = {name: _tolerance("forward", x.dtype, inputs) for name, x in self.output_shapes.items()}
        table = {name: _tolerance("gradient", self.input_shapes[name].dtype, inputs) for name in self.learned}
        return outputs | {gradient_name(name): tolerance for name, tolerance in table.items()}

    def costs(self) -> dict[str, Cost]:
        told = self.kernel._of_fields(self.problem.flags).cost(self.problem)
        if isinstance(told, Cost):
            return {FORWARD: told}
        if told is not None:
            return dict(zip((FORWARD, BOTH), told, strict=True))
        read, written = bytes_of(self.input_shapes), bytes_of(self.output_shapes)
        gradients = bytes_of({name: self.input_shapes[name] for name in self.learned})
        # The backward reads inputs, outputs and the outputs' cotangents.
        both = 2 * (read + written) + bytes_of(self.cotangent_shapes) + gradients
        return {FORWARD: Cost(0.0, read + written), BOTH: Cost(0.0, both)}

    def parts(self) -> tuple[Part, ...]:
        """The fields `forward` and `backward` of a configuration are tuned one after the other."""
        platform = self.implementation.load()
        fields = {field.name for field in dataclasses.fields(platform.config_type)}
        if fields != {"forward", "backward"} or platform.method("grad") is None:
            return ()
        gradients = tuple(map(gradient_name, self.learned))
        return Part("forward", tuple(self.output_shapes)), Part("backward", gradients)

    def record(self, groups: tuple[Arrays, Arrays, Arrays], config: Any) -> None:
        """Runs forward and backward on inputs, outputs and cotangents."""
        (arrays, outputs, cotangents), platform = groups, self.implementation.load()
        kind, fields = self.kernel.kind, self.problem.flags
        kind.forward(platform, arrays, fields, config, False)
        if kind.has_backward(platform):
            kind.backward(platform, arrays, fields, config, outputs, cotangents)

    def zeros(self, seed: int) -> tuple[Arrays, Arrays, Arrays]:
        shapes = self.input_shapes, self.output_shapes, self.cotangent_shapes
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make_workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of a user's platforms."""
    work = Work(implementation, problem)
    return Workload(
        make_inputs=work.make_inputs,
        run=work.run,
        reference=work.reference,
        tolerances=work.tolerances(),
        forward=tuple(work.output_shapes),
        parts=work.parts(),
        costs=work.costs(),
        launches=functools.partial(launches_of, work.record, work.zeros)
        if implementation.platform is Platform.TRITON
        else None,
    )


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """Builds a problem for `ejx.explain` and the command line.

    **Arguments:**

    - `dims`: a size for every letter of the inputs; `B`, the number of rows, defaults to 1.
    - `dtype`: the dtype of the float inputs. Others have their declared dtype, `int32` if only its kind is declared.
    - `flags`: the static fields, with the defaults of `__init__`.

    Raises `ValueError` for an unknown name, and for a missing size or field.
    """
    kernel = kernel_registry.ordered(operation)[0].load().kernel
    declaration: Declaration = kernel.declaration
    letters = {letter for declared in declaration.inputs for letter in declared.letters}
    unknown, missing = sorted(set(dims) - letters - {"B"}), sorted(letters - set(dims))
    if unknown or missing:
        raise ValueError(
            f"dims: expected sizes for {', '.join(sorted(letters))} and optionally B, received unknown {unknown} and missing {missing}."
        )
    sizes = {"B": 1, **dims}
    shape = lambda d: jax.ShapeDtypeStruct(d.shape(sizes, (sizes["B"],)), _example_dtype(d, dtype))
    arrays = {declared.name: shape(declared) for declared in declaration.inputs}
    return declaration.problem(arrays, _example_fields(kernel, flags))


def _example_dtype(declared: Declared, dtype: str) -> Any:
    if declared.dtype is None or is_float(declared.dtype):
        return jnp.dtype(dtype)
    kinds = {jnp.integer: jnp.int32, jnp.signedinteger: jnp.int32, jnp.unsignedinteger: jnp.uint32}
    return jnp.dtype(kinds.get(declared.dtype, declared.dtype))


def _example_fields(kernel: Any, flags: Mapping[str, Any]) -> Fields:
    absent = inspect.Parameter.empty
    defaults = {name: p.default for name, p in inspect.signature(kernel.__init__).parameters.items()}
    fields = {name: flags.get(name, defaults.get(name, absent)) for name in kernel._options()}
    unknown, missing = sorted(set(flags) - set(fields)), [n for n, value in fields.items() if value is absent]
    if unknown or missing:
        raise ValueError(
            f"flags: expected {', '.join(fields) or 'none'}, received unknown {unknown} and missing {missing}."
        )
    for name, value in fields.items():
        default = defaults.get(name, absent)
        numbers = isinstance(value, int | float) and isinstance(default, int | float)
        if default not in (absent, None) and type(value) is not type(default) and not numbers:
            raise ValueError(f"flag {name}: expected {type(default).__name__}, received {value!r}.")
    return tuple(sorted(fields.items()))


def gradient_name(name: str) -> str:
    """The name of a gradient among the results."""
    return f"d_{name}"


def _normal(shapes: Mapping[str, jax.ShapeDtypeStruct], key: Array) -> Arrays:
    keys = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in shapes}
    return {name: jax.random.normal(keys[name], x.shape, x.dtype) for name, x in shapes.items()}


def _tolerance(kind: str, dtype: Any, inputs: list[Any]) -> Tolerance:
    if not is_float(dtype):
        return Tolerance(0.0, 0.0)
    known = TOLERANCES.keys() & {jnp.dtype(x).name for x in (dtype, *inputs)}
    return max(TOLERANCES[name][kind] for name in known or {"bfloat16"})
