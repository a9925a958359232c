"""The kind of call of a user's kernel, for `core/`, built from its declaration and methods."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from .._kernel import Plan
from ..core import Kind
from ..dispatch import Implementation, Platform
from ..parallel import mapped, match_varying, wide
from .declaration import Arrays, check_gradients, check_outputs, Declaration, Fields, named_outputs
from .platforms import CustomPlatform, TritonLauncher

_REMEDY = "Forward mode is available on platform='xla', with run_xla and without grad_xla."


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CustomKind(Kind):
    """The facts that all calls of a kernel class share. The spec of a call is its static fields."""

    kernel: Any

    def given_of(self, arrays: Arrays) -> Arrays:
        return arrays

    def differentiates(self, platform: CustomPlatform) -> bool:
        return not platform.OPAQUE and not self.has_backward(platform)

    def has_backward(self, platform: CustomPlatform) -> bool:
        return platform.method("grad") is not None

    def plainly(self, platform: CustomPlatform, arrays: Arrays, fields: Fields, config: Any) -> Arrays:
        # Inside `shard_map` a loop may carry values that depend on any of the arrays.
        arrays = match_varying(arrays, arrays)
        of_rows = lambda arrays, over: self.forward(platform, arrays, fields, config, False)
        return mapped(of_rows, self.leading(self.axes_of(arrays, fields)))(arrays)

    def forward(
        self, platform: CustomPlatform, arrays: Arrays, fields: Fields, config: Any, save: bool
    ) -> Arrays:
        outputs = self._invoke("run", platform, fields, config, arrays)
        return check_outputs(self.kernel.declaration, f"run_{platform.written_as.value}", outputs, arrays)

    def backward(
        self,
        platform: CustomPlatform,
        arrays: Arrays,
        fields: Fields,
        config: Any,
        saved: Arrays,
        cotangents: Arrays,
    ) -> Arrays:
        gradients = self._invoke("grad", platform, fields, config, arrays, saved, cotangents)
        return check_gradients(
            self.kernel.declaration, f"grad_{platform.written_as.value}", gradients, arrays
        )

    def _invoke(self, kind: str, platform: CustomPlatform, fields: Fields, config: Any, *args: Arrays) -> Any:
        method = platform.method(kind)
        assert method is not None, "only existing methods are called"
        launcher = TritonLauncher(self.kernel.operation, platform.execute)
        rest = (launcher,) if platform.written_as is Platform.TRITON else ()
        return method(self.kernel._of_fields(fields), *args, config, *rest)


def kind_of(kernel: Any) -> CustomKind:
    """The kind of a kernel class, built from its declaration."""
    declaration: Declaration = kernel.declaration
    declared = (*declaration.inputs, *declaration.outputs)
    # A user's letters may coincide with names of heads and rows.
    letters = {
        letter: f"L{i}" for i, letter in enumerate(dict.fromkeys(n for d in declared for n in d.letters))
    }
    axes = {d.name: tuple(letters[letter] for letter in d.letters) for d in declared}
    outputs = tuple(declared.name for declared in declaration.outputs)

    def results(arrays: Arrays, fields: Fields) -> Arrays:
        of_rows = lambda arrays, over: reference_in_dtypes(kernel._of_fields(fields), arrays)
        return mapped(of_rows, kind.leading(axes))(arrays)

    kind = CustomKind(
        kernel=kernel,
        make=dict,
        problem_of=lambda operation, arrays, fields: declaration.problem(arrays, fields),
        axes_of=lambda arrays, fields: axes,
        reference=results,
        results=outputs,
        learned=tuple(declared.name for declared in declaration.inputs),
        shared=frozenset(declaration.shared),
        one_by_one=True,
        read=outputs,
        names={name: f"{declaration.operation}.{name}" for name in outputs},
        remedy=_REMEDY,
    )
    return kind


def evaluate(kernel: Any, fields: Fields, arrays: Arrays) -> Arrays:
    """The outputs by name, on the platform that the kernel's plan chooses for these shapes."""
    return kernel.kind.call(kernel.plan, kernel.operation, arrays, fields)


def reference(kernel: Any, arrays: Arrays) -> dict[str, Any]:
    """The reference outputs for one batch axis, in float32 or wider."""
    results = kernel.reference(**{name: wide(x) for name, x in arrays.items()})
    return named_outputs(kernel.declaration, "reference", results)


def reference_in_dtypes(kernel: Any, arrays: Arrays) -> Arrays:
    """Casts results to the declared dtypes of the outputs."""
    declaration: Declaration = kernel.declaration
    dtypes = {name: x.dtype for name, x in arrays.items()}
    outputs = reference(kernel, arrays)
    return {
        declared.name: jnp.asarray(outputs[declared.name]).astype(declaration.output_dtype(declared, dtypes))
        for declared in declaration.outputs
    }


def fixed_plan(plan: Plan, implementation: Implementation) -> Plan:
    """A plan of one implementation on one device."""
    device = dataclasses.replace(plan.device, count=1)
    snapshot = dataclasses.replace(plan.here, implementations=(implementation,), device=device)
    return dataclasses.replace(plan, snapshot=snapshot, elsewhere=())
