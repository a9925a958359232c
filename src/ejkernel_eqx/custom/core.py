"""One call of a user's kernel, from checked arrays to a platform and back: differentiation, batching, partitioning.

The only `custom_vjp` of all such kernels is here. Around a kernel that nothing can look into the order is custom_vjp, custom_vmap,
custom_partitioning, merging of the batch axes, kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._jitted import compiled_once
from .._kernel import Plan
from .._reverse_only import reverse_only
from ..dispatch import Implementation, is_traced_anew, Platform, Selection
from ..dispatch.labels import kernel_scope
from ..parallel import how_split, match_sharding, match_varying, Split
from . import folding
from .declaration import (
    Arrays,
    check_gradients,
    check_outputs,
    Declaration,
    Fields,
    floats,
    named_outputs,
    widened,
)
from .platforms import CustomPlatform, Execute, launcher, TritonLauncher


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a call but its arrays: the kernel's class and static fields, its plan and what that knows, the implementation that was
    chosen."""

    kernel: Any
    fields: Fields
    plan: Plan
    answers: Any
    implementation: Implementation

    @property
    def declaration(self) -> Declaration:
        return self.kernel.declaration

    @property
    def platform(self) -> CustomPlatform:
        return self.implementation.load()

    def choose(self, arrays: Arrays) -> Selection:
        problem = self.declaration.problem(arrays, self.fields)
        return self.plan.select(problem, platform=self.implementation.platform)


def evaluate(kernel: Any, fields: Fields, arrays: Arrays) -> Arrays:
    """The outputs by name, on the platform that the kernel's plan chooses for these shapes."""
    declaration: Declaration = kernel.declaration
    selection = kernel.plan.select(declaration.problem(arrays, fields))
    call = Call(type(kernel), fields, kernel.plan, kernel.plan.here.answers, selection.implementation)
    evaluate = functools.partial(_evaluate, call) if is_traced_anew() else compiled_once(_evaluate, call)
    return evaluate(arrays)


def _evaluate(call: Call, arrays: Arrays) -> Arrays:
    # Inside `shard_map` a gradient varies over every axis that any array does: so must the arrays that it belongs to.
    function, arrays = _function(call), match_varying(arrays, arrays)
    return function(arrays) if call.platform.OPAQUE else folding.over_mesh(function, arrays, call.declaration)


@functools.lru_cache(maxsize=4096)
def _function(call: Call) -> Callable[[Arrays], Arrays]:
    """The call as a function of its arrays."""
    platform, declaration = call.platform, call.declaration
    make = _opaque if platform.OPAQUE else _transparent
    forward = _named(make(call, _forward), declaration)
    if platform.method("grad") is not None:
        backward = make(call, _backward)
    elif platform.OPAQUE:
        backward = folding.mapped(functools.partial(_reference_gradient, call), declaration)
    else:
        return forward

    @jax.custom_vjp
    def function(arrays: Arrays) -> Arrays:
        return forward(arrays)

    def function_forward(arrays: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        outputs = forward(arrays)
        return outputs, (arrays, outputs)

    def function_backward(residuals: tuple[Arrays, Arrays], cotangents: Arrays) -> tuple[dict[str, Any]]:
        arrays, outputs = residuals
        cotangents = {name: cotangents[name] for name in floats(outputs)}
        gradients: dict[str, Any] = dict.fromkeys(arrays)
        for name, gradient in folding.sum_rows(backward(arrays, outputs, cotangents), arrays).items():
            x = arrays[name]
            gradients[name] = match_sharding(gradient.astype(x.dtype), x)
        return (gradients,)

    function.defvjp(function_forward, function_backward)
    name, remedy = (
        declaration.operation,
        "What run_xla does without grad_xla has forward mode, on platform='xla'.",
    )
    return lambda arrays: function(reverse_only(arrays, name, call.implementation.platform, remedy))


def _named(function: folding.Function, declaration: Declaration) -> folding.Function:
    """The outputs under the names by which `jax.checkpoint` policies know them: operation and output."""

    def call(arrays: Arrays) -> Arrays:
        outputs = function(arrays)
        return {name: checkpoint_name(x, f"{declaration.operation}.{name}") for name, x in outputs.items()}

    return call


Compute = Callable[..., Arrays]


def _opaque(call: Call, compute: Compute) -> folding.Function:
    declaration = call.declaration

    def of_rows(*args: Arrays) -> Arrays:
        return compute(call, call.choose(args[0]), *args)

    folded = folding.folded(of_rows, declaration)
    meshes = how_split(call.implementation.platform, call.plan.device)
    split = folded if meshes is Split.NOWHERE else folding.split(folded, declaration, meshes)
    return folding.batched(split, declaration, folded)


def _transparent(call: Call, compute: Compute) -> folding.Function:
    def function(*args: Arrays) -> Arrays:
        selection = call.choose(args[0])

        def of_rows(*args: Arrays) -> Arrays:
            result = compute(call, selection, *args)
            return folding.sum_rows(result, args[0]) if len(args) > 1 else result

        return folding.mapped(of_rows, call.declaration)(*args)

    return function


def _forward(call: Call, selection: Selection, arrays: Arrays) -> Arrays:
    """The outputs of one batch axis, on one platform."""
    with kernel_scope(selection):
        outputs = _invoke(call, "run", selection, arrays)
    return check_outputs(call.declaration, _method_name(call, "run"), outputs, arrays)


def _backward(
    call: Call, selection: Selection, arrays: Arrays, outputs: Arrays, cotangents: Arrays
) -> Arrays:
    """The gradients of one batch axis, on one platform; those of shared inputs whole or as rows."""
    with kernel_scope(selection):
        gradients = _invoke(call, "grad", selection, arrays, outputs, cotangents)
    return check_gradients(call.declaration, _method_name(call, "grad"), gradients, arrays)


def _invoke(call: Call, kind: str, selection: Selection, *args: Arrays) -> Any:
    method = call.platform.method(kind)
    assert method is not None, "only a method that is there is called"
    rest = (launcher(call.declaration.operation, selection.platform),) if _launches(call) else ()
    return method(call.kernel._of_fields(call.fields), *args, selection.config, *rest)


def record(
    platform: CustomPlatform, fields: Fields, config: Any, execute: Execute, args: tuple[Arrays, ...]
) -> None:
    """Calls the Triton methods of a platform on inputs, outputs and cotangents, with another `execute`."""
    launch = TritonLauncher(platform.kernel.operation, execute)
    for kind, count in (("run", 1), ("grad", 3)):
        method = platform.method(kind)
        if method is not None:
            method(platform.kernel._of_fields(fields), *args[:count], config, launch)


def _launches(call: Call) -> bool:
    return call.platform.written_as is Platform.TRITON


def _method_name(call: Call, kind: str) -> str:
    return f"{kind}_{call.platform.written_as.value}"


def reference(kernel: Any, arrays: Arrays) -> dict[str, Any]:
    """The outputs of one batch axis by the plain mathematics, in float32 or wider."""
    wide = {name: widened(x) for name, x in arrays.items()}
    return named_outputs(kernel.declaration, "reference", kernel.reference(**wide))


def reference_in_dtypes(kernel: Any, arrays: Arrays) -> Arrays:
    """The same, in the dtypes that the outputs are declared to have."""
    declaration: Declaration = kernel.declaration
    dtypes = {name: x.dtype for name, x in arrays.items()}
    outputs = reference(kernel, arrays)
    return {
        declared.name: jnp.asarray(outputs[declared.name]).astype(declaration.output_dtype(declared, dtypes))
        for declared in declaration.outputs
    }


def _reference_gradient(call: Call, arrays: Arrays, outputs: Arrays, cotangents: Arrays) -> Arrays:
    kernel = call.kernel._of_fields(call.fields)

    def function(learned: Arrays) -> Arrays:
        results = reference_in_dtypes(kernel, {**arrays, **learned})
        return {name: results[name] for name in cotangents}

    _, pull = jax.vjp(function, {name: arrays[name] for name in floats(arrays)})
    return pull(cotangents)[0]


def fixed_plan(plan: Plan, implementation: Implementation) -> Plan:
    """A plan of one implementation on one device."""
    device = dataclasses.replace(plan.device, count=1)
    snapshot = dataclasses.replace(plan.here, implementations=(implementation,), device=device)
    return dataclasses.replace(plan, snapshot=snapshot, elsewhere=())
