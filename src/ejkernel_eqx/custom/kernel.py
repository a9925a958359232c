"""`CustomKernel`: the base class that gives users' kernels everything that built-in kernels have."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, get_origin

import jax
from jax import Array

from .._kernel import as_inputs, Kernel, make_plan, Plan, settle
from ..dispatch import Backend, Cost, DeviceFacts, Implementation, kernel_registry, Platform, Problem
from . import core
from .declaration import check_arrays, Declaration, Fields, parse
from .platforms import CustomPlatform, NoConfig, PLATFORMS

_FLAGS = (bool, int, float, str, type(None))
_HERE = __package__


class CustomKernel(Kernel):
    """Base class for your own operations: one subclass provides a plan, tuning, caching, `vmap`, gradients, sharding and `explain`.

    A subclass is final. It declares

    - `operation`: the name used in tables, explanations and errors, such as `"my_project.geglu"`;
    - `inputs`, `outputs`: array names and their axes, one letter each, as in `{"x": "... T D", "weight": "D"}`. `...` stands for any number
        of batch axes, which the kernel sees merged into one; an input without it is shared by all rows. A pair also specifies the
        dtype or, for an input, the kind of dtype: `("...", jnp.float32)`, `("...", jnp.integer)`. An output without a dtype has
        that of the first float input;
    - options as static fields (`bool`, `int`, `float`, `str` or `None`), which are part of the key in tables, and `plan`;
    - `__init__`, which ends with `self.plan = self.make_plan(...)`, and `__call__`, which calls `self.launch(...)`;
    - `reference`, the mathematical definition, against which all platforms are checked.

    A method `run_triton`, `run_xla`, `run_pallas` or `run_cuda` adds that platform (`run_triton` also the interpreter). Without
    `run_xla` the reference runs on XLA. `grad_triton` and so on return gradients. Without them JAX differentiates `run_xla`, and for
    all other platforms the reference. `config_types` maps platforms to the frozen dataclasses of their configurations. Missing or
    invalid declarations raise when the class is defined. The guide *Your own kernel* writes one step by step.
    """

    inputs: ClassVar[Mapping[str, Any]]
    outputs: ClassVar[Mapping[str, Any]]
    config_types: ClassVar[Mapping[Any, type]] = {}
    """Maps platforms to the classes of their configurations. Platforms without an entry have nothing to configure."""
    lengths: ClassVar[frozenset[str]] = frozenset()
    """Letters whose sizes vary between calls. They are rounded up to a power of two in tables, as the number of rows `B` always is."""
    backends: ClassVar[Mapping[Any, Backend]] = {}
    """The backend that a platform needs, if it is not the default: `{Platform.PALLAS: Backend.GPU}`."""
    version: ClassVar[int] = 1
    """Increment it when a change of the kernels invalidates tuned tables."""
    declaration: ClassVar[Declaration]
    kind: ClassVar[core.CustomKind]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _define(cls)

    def reference(self, **arrays: Array) -> Any:
        """The outputs (one array, a tuple in order, or a mapping) in plain, differentiable JAX. Arrays are in float32 or wider and have
        one batch axis."""
        raise NotImplementedError

    def run_xla(self, arrays: dict[str, Array], config: Any) -> Any:
        """The outputs on platform `"xla"`; by default those of the reference, in float32 or wider."""
        return core.reference_in_dtypes(self, arrays)

    def default_config(self, platform: Platform, problem: Problem, device: DeviceFacts) -> Any:
        """The configuration for a problem that no table contains; by default the first candidate."""
        return self.candidates(platform, problem, device)[0]

    def candidates(self, platform: Platform, problem: Problem, device: DeviceFacts) -> list[Any]:
        """The configurations worth timing, at most a dozen; by default only the default configuration."""
        return [self.default_config(platform, problem, device)]

    def unsupported(self, platform: Platform, problem: Problem, device: DeviceFacts) -> str | None:
        """The reason why a platform cannot run a problem, such as `"takes D up to 1024"`; `None` if it can."""
        return None

    def config_unsupported(
        self, platform: Platform, config: Any, problem: Problem, device: DeviceFacts
    ) -> str | None:
        """The reason why a configuration cannot run a problem, as far as can be told without compiling; `None` if no reason is known."""
        return None

    def example_inputs(self, problem: Problem, key: Array) -> dict[str, Array]:
        """Inputs for tuning. The arrays returned here replace the default, normal random numbers; integer inputs require it.

        `problem.dim("D")` is the size of an axis, `problem.dim("B")` the number of rows, `problem.dtype("x")` a dtype.
        """
        return {}

    def cost(self, problem: Problem) -> Cost | tuple[Cost, Cost] | None:
        """The least that the forward (and the forward with backward) must compute and move; by default every array once."""
        return None

    def make_plan(
        self,
        *,
        platform: "str | Platform | None" = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ) -> Plan:
        """Builds the plan; call it last in `__init__`. It uses everything known now, and fixes the choice for `tune_for`.

        **Arguments:**

        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this configuration, which implies its platform.
        - `tune_for`: arguments of the call (a tuple or `ejx.inputs(...)`), as arrays or `jax.ShapeDtypeStruct`s.
        """
        fields = _fields_of(self)
        plan = make_plan(self.operation, platform=platform, config=config)
        if tune_for is None:
            return plan
        return settle(self._of_fields(fields, plan), as_inputs(tune_for))

    def launch(self, **arrays: Any) -> Any:
        """Runs the kernel on arrays passed by name. Returns the output, or a tuple of outputs in their declared order.

        Raises `ValueError` for arrays that do not fit the declaration, and `UnsupportedError` if no platform supports the call.
        """
        with jax.named_scope(f"{_HERE}.{type(self).__name__}"):
            checked = check_arrays(self.declaration, arrays)
            outputs = core.evaluate(self, _fields_of(self), checked)
        results = tuple(outputs[declared.name] for declared in self.declaration.outputs)
        return results[0] if len(results) == 1 else results

    @classmethod
    def _options(cls) -> list[str]:
        """The names of the static fields, except for the plan."""
        return sorted(field.name for field in dataclasses.fields(cls) if field.name != "plan")

    @classmethod
    def _of_fields(cls, fields: Fields, plan: Plan | None = None) -> Any:
        """An instance with these static fields, without calling `__init__`; without a plan it can only be queried."""
        new = object.__new__(cls)
        for name, value in (*fields, ("plan", plan)):
            object.__setattr__(new, name, value)
        return new


def _fields_of(kernel: CustomKernel) -> Fields:
    """The options of a kernel, sorted by name; `ValueError` for one that is missing or cannot be part of a key."""
    values = []
    for name in type(kernel)._options():
        if not hasattr(kernel, name):
            raise ValueError(
                f"{type(kernel).__name__}.__init__: set the field {name!r} before self.make_plan."
            )
        value = getattr(kernel, name)
        if type(value) not in _FLAGS:
            raise ValueError(
                f"{type(kernel).__name__}.{name}: expected a bool, int, float, str or None, which can be part of a key in tuned tables, "
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
    if cls.operation in kernel_registry.list_operations():  # the previous definition of the same class
        for known in kernel_registry.ordered(cls.operation):
            if isinstance(known.target, CustomPlatform):
                kernel_registry.remove(known)
    backends = {Platform(name): Backend(backend) for name, backend in cls.backends.items()}
    for platform, (backend, priority) in PLATFORMS.items():
        target, place = CustomPlatform(cls, platform), (platform, backends.get(platform, backend))
        if target.method("run") is not None:
            workload = f"{_HERE}.workload:make_workload"
            kernel_registry.add(
                Implementation(cls.operation, *place, priority, cls.operation, target, workload)
            )


def _missing(cls: type) -> list[str]:
    wanted = {
        "operation": 'its name, such as operation = "my_project.name"',
        "inputs": 'its arrays and their axes, such as inputs = {"x": "... D"}',
        "outputs": 'its results and their axes, such as outputs = {"out": "... D"}',
        "__init__": "def __init__(self, ..., *, platform=None, config=None, tune_for=None), which ends with self.plan = self.make_plan(...)",
        "__call__": "def __call__(self, ...), which returns self.launch(...)",
        "reference": "def reference(self, ...), its mathematical definition in terms of the named inputs",
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
        if getattr(cls, f"run_{name!s}", None) is None:
            found.append(f"config_types[{str(name)!r}]: there is no method run_{name!s}.")
    base = CustomKernel
    asked = (cls.default_config is base.default_config) and (cls.candidates is base.candidates)
    if asked and any(kind is not NoConfig for kind in cls.config_types.values()):
        found.append(
            "candidates (or default_config) is missing: config_types declares configurations that nothing creates."
        )
    return found


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
                f'outputs[{declared.name!r}]: expected batch axes ("..."), as each row of an output is computed from one row of the inputs; '
                "reduce over rows outside the kernel."
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
    """Returns whether another class has this operation's name; redefining the same class (rerunning a notebook cell) replaces it."""
    if cls.operation not in kernel_registry.list_operations():
        return []
    for implementation in kernel_registry.ordered(cls.operation):
        owner = getattr(implementation.target, "kernel", None)
        if owner is None or (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
            return [
                f"operation: {cls.operation!r} is already used by {owner or implementation.core}; choose another name."
            ]
    return []
