"""`CustomKernel`: what a user subclasses to give his own kernel everything that ours have."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, get_origin

import jax
from jax import Array

from .._inputs import as_inputs
from .._kernel import Kernel, make_plan, Plan, settle
from ..dispatch import Backend, Cost, DeviceFacts, Implementation, kernel_registry, Platform, Problem
from . import core
from .declaration import check_arrays, Declaration, Fields, parse
from .platforms import CustomPlatform, NoConfig, PLATFORMS

_FLAGS = (bool, int, float, str, type(None))
_HERE = __package__


class CustomKernel(Kernel):
    """Base of an operation of your own: one class gives it a plan, tuning, caching, `vmap`, gradients, sharding and `explain`.

    A subclass is final. It declares

    - `operation`: its name in tables, explanations and errors, such as `"my_project.geglu"`;
    - `inputs`, `outputs`: array name to axes, a letter each, as in `{"x": "... T D", "weight": "D"}`. `...` stands for any number of
        batch axes, which the kernel sees merged into one; an input without it is shared by all rows. A pair names the
        dtype as well, or its kind for an input: `("...", jnp.float32)`, `("...", jnp.integer)`. An output without a dtype has
        that of the first float input;
    - options as static fields (`bool`, `int`, `float`, `str` or `None`), which enter the key of every table, and `plan`;
    - `__init__`, which ends with `self.plan = self.make_plan(...)`, and `__call__`, which calls `self.launch(...)`;
    - `reference`, the plain mathematics, of which everything else is checked to be a faster form.

    A method `run_triton`, `run_xla`, `run_pallas` or `run_cuda` adds that platform (and `run_triton` the interpreter);
    without `run_xla` the reference runs there. `grad_triton` and so on give gradients; without one, JAX differentiates `run_xla`, and
    the reference in place of any other. `config_types` names the frozen dataclass of a platform's choices. What is missing
    or does not fit is said when the class is defined. The guide *Your own kernel* writes one step by step.
    """

    inputs: ClassVar[Mapping[str, Any]]
    outputs: ClassVar[Mapping[str, Any]]
    config_types: ClassVar[Mapping[Any, type]] = {}
    """Platform to the class of its configurations. A platform that is not there has nothing to choose."""
    lengths: ClassVar[frozenset[str]] = frozenset()
    """Letters whose sizes vary from call to call: rounded up to a power of two in tables, as the number of rows `B` always is."""
    backends: ClassVar[Mapping[Any, Backend]] = {}
    """The device a platform needs, where it is not the usual one: `{Platform.PALLAS: Backend.GPU}`."""
    version: ClassVar[int] = 1
    """Raise it when a change of the kernels makes tuned tables worthless."""
    declaration: ClassVar[Declaration]
    kind: ClassVar[core.CustomKind]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _define(cls)

    def reference(self, **arrays: Array) -> Any:
        """The outputs (one array, a tuple in their order, or a mapping) by plain JAX, differentiable. Arrays come in float32
        or wider, with one batch axis."""
        raise NotImplementedError

    def run_xla(self, arrays: dict[str, Array], config: Any) -> Any:
        """The outputs on platform `"xla"`; by default the reference, in float32 or wider."""
        return core.reference_in_dtypes(self, arrays)

    def default_config(self, platform: Platform, problem: Problem, device: DeviceFacts) -> Any:
        """The configuration for a problem that no table knows; by default the first candidate."""
        return self.candidates(platform, problem, device)[0]

    def candidates(self, platform: Platform, problem: Problem, device: DeviceFacts) -> list[Any]:
        """The configurations worth timing, at most a dozen; by default only the default."""
        return [self.default_config(platform, problem, device)]

    def unsupported(self, platform: Platform, problem: Problem, device: DeviceFacts) -> str | None:
        """Why a platform cannot run a problem, as `"takes D up to 1024"`; `None` if it can."""
        return None

    def config_unsupported(
        self, platform: Platform, config: Any, problem: Problem, device: DeviceFacts
    ) -> str | None:
        """Why a configuration cannot run a problem, as far as that is known without compiling; `None` if nothing speaks against it."""
        return None

    def example_inputs(self, problem: Problem, key: Array) -> dict[str, Array]:
        """Inputs to tune with, where normal random numbers would not do: those named here replace them. Integer inputs need it.

        `problem.dim("D")` is the size of an axis, `problem.dim("B")` the number of rows, `problem.dtype("x")` a dtype.
        """
        return {}

    def cost(self, problem: Problem) -> Cost | tuple[Cost, Cost] | None:
        """What the forward (and the forward with the backward) must at least compute and move; by default every array once."""
        return None

    def make_plan(
        self,
        *,
        platform: "str | Platform | None" = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ) -> Plan:
        """The plan, to be made last in `__init__`: from everything known now, and with the choice for `tune_for` made now.

        **Arguments:**

        - `platform`: use this platform or raise; `None` chooses by device and request.
        - `config`: use this configuration; it implies its platform.
        - `tune_for`: the arguments of the call (a tuple, or `ejx.inputs(...)`), arrays or `jax.ShapeDtypeStruct`s.
        """
        fields = _fields_of(self)
        plan = make_plan(self.operation, platform=platform, config=config)
        if tune_for is None:
            return plan
        return settle(self._of_fields(fields, plan), as_inputs(tune_for))

    def launch(self, **arrays: Any) -> Any:
        """Runs the kernel on arrays by name: the output, or a tuple of the outputs in their declared order.

        Raises `ValueError` for arrays that do not fit the declaration, `UnsupportedError` if no platform supports the call.
        """
        with jax.named_scope(f"{_HERE}.{type(self).__name__}"):
            checked = check_arrays(self.declaration, arrays)
            outputs = core.evaluate(self, _fields_of(self), checked)
        results = tuple(outputs[declared.name] for declared in self.declaration.outputs)
        return results[0] if len(results) == 1 else results

    @classmethod
    def _options(cls) -> list[str]:
        """The names of the static fields, but for the plan."""
        return sorted(field.name for field in dataclasses.fields(cls) if field.name != "plan")

    @classmethod
    def _of_fields(cls, fields: Fields, plan: Plan | None = None) -> Any:
        """An instance with these static fields. `__init__` is not called; without a plan it only answers questions."""
        new = object.__new__(cls)
        for name, value in (*fields, ("plan", plan)):
            object.__setattr__(new, name, value)
        return new


def _fields_of(kernel: CustomKernel) -> Fields:
    """The options of a kernel, sorted by name; `ValueError` for one that is missing or cannot enter a key."""
    values = []
    for name in type(kernel)._options():
        if not hasattr(kernel, name):
            raise ValueError(
                f"{type(kernel).__name__}.__init__: set the field {name!r} before self.make_plan."
            )
        value = getattr(kernel, name)
        if type(value) not in _FLAGS:
            raise ValueError(
                f"{type(kernel).__name__}.{name}: expected a bool, int, float, str or None, which the key of a tuned table can hold, "
                f"received a {type(value).__name__}; split it into such fields, or pass arrays to the call."
            )
        values.append((name, value))
    return tuple(values)


def _define(cls: type[CustomKernel]) -> None:
    """Checks a new class, reads its declaration and registers its platforms."""
    problems = [*_missing(cls), *_wrong_fields(cls), *_wrong_configs(cls)]
    if not problems:
        declaration, wrong = _declaration(cls)
        problems += wrong
        cls.declaration = declaration
        cls.kind = core.kind_of(cls)
    if problems:
        raise ValueError(f"{cls.__qualname__}, a CustomKernel:\n" + "\n".join(f"- {p}" for p in problems))
    if cls.operation in kernel_registry.list_operations():  # the same class as it was before
        for known in kernel_registry.ordered(cls.operation):
            if isinstance(known.target, CustomPlatform):
                kernel_registry.remove(known)
    for platform, backend, priority in _platforms(cls):
        target = CustomPlatform(cls, platform)
        kernel_registry.add(
            Implementation(
                cls.operation,
                platform,
                backend,
                priority,
                cls.operation,
                target,
                f"{_HERE}.workload:make_workload",
            )
        )


def _missing(cls: type) -> list[str]:
    wanted = {
        "operation": 'its name, as operation = "my_project.name"',
        "inputs": 'its arrays and their axes, as inputs = {"x": "... D"}',
        "outputs": 'its results and their axes, as outputs = {"out": "... D"}',
        "__init__": "def __init__(self, ..., *, platform=None, config=None, tune_for=None), which ends with self.plan = self.make_plan(...)",
        "__call__": "def __call__(self, ...), which returns self.launch(...)",
        "reference": "def reference(self, ...), the plain mathematics of the inputs by name",
    }
    found = [f"{name} is missing: {what}." for name, what in wanted.items() if name not in cls.__dict__]
    if "plan" not in inspect.get_annotations(cls):
        found.append("plan is missing: declare plan: ejx.Plan = eqx.field(static=True).")
    return found


def _wrong_fields(cls: type) -> list[str]:
    found = []
    for name, annotation in inspect.get_annotations(cls).items():
        is_class = annotation is ClassVar or get_origin(annotation) is ClassVar
        if is_class or (isinstance(annotation, str) and re.match(r"(\w+\.)?ClassVar\b", annotation)):
            continue
        field = cls.__dict__.get(name)
        if not isinstance(field, dataclasses.Field) or not field.metadata.get("static"):
            found.append(
                f"field {name} is not static: write {name} = eqx.field(static=True) with its annotation; arrays are passed to the call, "
                "and weights belong to a layer that holds this kernel."
            )
    return found


def _wrong_configs(cls: Any) -> list[str]:
    found = []
    for name, kind in cls.config_types.items():
        params = getattr(kind, "__dataclass_params__", None)
        if params is None or not params.frozen:
            found.append(f"config_types[{str(name)!r}]: expected a frozen dataclass, received {kind!r}.")
        if _runs(cls, name) is None:
            found.append(f"config_types[{str(name)!r}]: there is no method run_{name!s}.")
    base = CustomKernel
    asked = (cls.default_config is base.default_config) and (cls.candidates is base.candidates)
    if asked and any(kind is not NoConfig for kind in cls.config_types.values()):
        found.append(
            "candidates (or default_config) is missing: config_types has choices that nothing makes."
        )
    return found


def _runs(cls: Any, platform: Any) -> Any:
    return getattr(cls, f"run_{platform!s}", None)


def _declaration(cls: Any) -> tuple[Declaration, list[str]]:
    inputs, outputs = parse("inputs", cls.inputs), parse("outputs", cls.outputs)
    letters = {letter for declared in inputs for letter in declared.letters}
    found = []
    if not re.fullmatch(r"[\w.-]+", cls.operation):
        found.append(f"operation: expected letters, digits, '.', '_' and '-', received {cls.operation!r}.")
    if not any(declared.batched for declared in inputs):
        found.append('inputs: expected at least one with batch axes ("...").')
    for declared in outputs:
        if not declared.batched:
            found.append(
                f'outputs[{declared.name!r}]: expected batch axes ("..."): a row of the output comes from a row of the inputs; '
                "reduce over rows outside."
            )
        if unknown := [letter for letter in declared.letters if letter not in letters]:
            found.append(f"outputs[{declared.name!r}]: no input has the axes {unknown}.")
    if both := {d.name for d in inputs} & {d.name for d in outputs}:
        found.append(f"inputs and outputs share the names {sorted(both)}; rename one.")
    if unknown := sorted(set(cls.lengths) - letters):
        found.append(f"lengths: no input has the axes {unknown}.")
    if not outputs:
        found.append("outputs: expected at least one.")
    found += _taken(cls)
    return Declaration(cls.operation, inputs, outputs, frozenset(cls.lengths)), found


def _taken(cls: Any) -> list[str]:
    """Another class of this operation; the same class defined anew (a notebook's cell run again) replaces itself."""
    if cls.operation not in kernel_registry.list_operations():
        return []
    for implementation in kernel_registry.ordered(cls.operation):
        owner = getattr(implementation.target, "kernel", None)
        if owner is None or (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
            return [
                f"operation: {cls.operation!r} is taken by {owner or implementation.core}; choose another name."
            ]
    return []


def _platforms(cls: Any) -> list[tuple[Platform, Backend, int]]:
    backends = {Platform(name): Backend(backend) for name, backend in cls.backends.items()}
    return [
        (platform, backends.get(platform, backend), priority)
        for platform, (backend, priority) in PLATFORMS.items()
        if _runs(cls, CustomPlatform(cls, platform).written_as) is not None
    ]
