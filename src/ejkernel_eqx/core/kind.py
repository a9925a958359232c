"""The one way from an operation to a kernel: choose, differentiate, fold mapped and leading axes, split over a mesh, launch.

A family declares its kinds of calls. A platform whose kernels JAX differentiates itself (XLA) has `apply(arrays, spec, config)`, with any leading
axes. An opaque one has, with exactly one leading axis on all arrays but shared ones,

- `forward(arrays, spec, config, *, save)`, which gives the results by name, and where asked to `save` what its backward needs of them beside;
- `backward(arrays, spec, config, saved, cotangents)`, which gives the gradient of every float array that there is, by name.

Both have `step(arrays, spec, config)` for a family with steps. Results of `apply` and `step` come by name, or in order.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from .._errors import UnsupportedError
from .._jitted import jitted
from .._kernel import Plan
from .._reverse_only import FORWARD_MODE, reverse_only
from ..dispatch import hooks_of, Platform, Problem, Selection
from ..dispatch.labels import kernel_scope
from ..parallel import given_of, how_split, match_sharding, match_varying, opaque, over_mesh

Named = dict[str, Array]
Letters = dict[str, tuple[str, ...]]

# What stands before the names of arrays that are neither given nor results.
_SAVED, _COTANGENT, _GRADIENT = "saved ", "cotangent ", "gradient "


def _nothing(platform: Any, arrays: Any, spec: Any) -> Letters:
    return {}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """What all calls of one kind have in common.

    - `make`: the NamedTuple class of a call's arrays; what a call does not have is `None`.
    - `problem_of(operation, arrays, spec)`: the problem of a call of these shapes.
    - `axes_of(arrays, spec)`: the axes behind the leading ones of every array that there may be and of every result, as `parallel.opaque` has
      them.
    - `reference(arrays, spec)`: the results by the plain mathematics, in float32 or wider.
    - `results`: their names, the first `out`.
    - `learned`: the arrays that gradients are taken in.
    - `shared`: those without leading axes.
    - `saved_of(platform, arrays, spec)`: the axes behind the leading ones of what a forward kernel saves for the backward.
    - `names`: what policies of `jax.checkpoint` know a result by, and, as `"saved"`, what is saved; by default operation and result.
    - `sliced`: whether a mesh may take heads out of whole arrays, as `parallel.partitioned` has it.
    """

    make: Callable[..., Any]
    problem_of: Callable[[str, Any, Any], Problem]
    axes_of: Callable[[Any, Any], Letters]
    reference: Callable[[Any, Any], Any]
    results: tuple[str, ...]
    learned: tuple[str, ...]
    shared: frozenset[str] = frozenset()
    saved_of: Callable[[Any, Any, Any], Letters] = _nothing
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sliced: bool = True

    def call(self, plan: Plan, operation: str, arrays: Any, spec: Any) -> Named:
        """The results on the platform that the plan chooses."""
        return jitted(self._call, plan, operation, spec)(arrays)

    def _call(self, plan: Plan, operation: str, spec: Any, arrays: Any) -> Named:
        selection = plan.select(self.problem_of(operation, arrays, spec))
        platform, given = selection.implementation.load(), given_of(arrays)
        if is_opaque(platform):
            given = reverse_only(match_varying(given, given), operation, selection.platform, FORWARD_MODE)
            return self._opaque(plan, selection, spec)(given)

        def transparent(given: Named) -> Named:
            return self.by_name(self.plainly(platform, self.make(**given), spec, selection.config))

        with kernel_scope(selection):
            return over_mesh(transparent, given, self.axes_of(arrays, spec))

    def plainly(self, platform: Any, arrays: Any, spec: Any, config: Any) -> Any:
        """The results on a platform that JAX differentiates."""
        return platform.apply(arrays, spec, config)

    def by_name(self, results: Any) -> Named:
        return (
            dict(results) if isinstance(results, Mapping) else dict(zip(self.results, results, strict=True))
        )

    def arrays_of(self, given: Named) -> Any:
        """Those of a call among others that ride along."""
        return self.make(**{name: x for name, x in given.items() if " " not in name})

    def _opaque(self, plan: Plan, selection: Selection, spec: Any) -> Callable[[Named], Named]:
        """The call of an opaque platform as a function of its arrays."""
        operation, implementation = selection.problem.operation, selection.implementation.load()

        def forward(save: bool, arrays: Any, config: Any, rest: Named) -> Named:
            results = dict(implementation.forward(arrays, spec, config, save=save))
            named = {name: results.pop(name) for name in self.results}
            return named | {f"{_SAVED}{name}": x for name, x in results.items() if save}

        def backward(arrays: Any, config: Any, rest: Named) -> Named:
            saved, cotangents = _with(_SAVED, rest), _with(_COTANGENT, rest)
            grads = implementation.backward(arrays, spec, config, saved, cotangents)
            return {f"{_GRADIENT}{name}": x for name, x in grads.items()}

        launch = self._launcher(plan, selection, spec)

        @jax.custom_vjp
        def call(given: Named) -> Named:
            return launch(functools.partial(forward, False), given)

        def call_forward(given: Named) -> tuple[Named, tuple[Named, Named]]:
            results = {
                name: checkpoint_name(x, self._name(operation, name))
                for name, x in launch(functools.partial(forward, True), given).items()
            }
            saved = {name: results.pop(name) for name in list(results) if name not in self.results}
            return results, (given, saved)

        def call_backward(
            residuals: tuple[Named, Named], cotangents: Named
        ) -> tuple[dict[str, Array | None]]:
            given, saved = residuals
            named = {f"{_COTANGENT}{name}": x for name, x in cotangents.items()}
            grads = _with(_GRADIENT, launch(backward, given | saved | named, summed=True))
            return (
                {name: like(grads[name], x) if name in self.learned else None for name, x in given.items()},
            )

        call.defvjp(call_forward, call_backward)
        return call

    def _name(self, operation: str, name: str) -> str:
        key = "saved" if name.startswith(_SAVED) else name
        return self.names.get(key, f"{operation}_{name}")

    def _launcher(self, plan: Plan, selection: Selection, spec: Any) -> Callable[..., Named]:
        """`launch(compute, given)`: `compute(arrays, config, rest)` as one launch, folded and split; the configuration is chosen for its shapes."""
        platform, implementation = selection.platform, selection.implementation.load()
        split = how_split(platform, plan.device)

        def launch(compute: Callable[..., Named], given: Named, summed: bool = False) -> Named:
            def merged(given: Named) -> Named:
                """By the shapes of the launch: all leading axes are merged by now."""
                arrays = self.arrays_of(given)
                problem = self.problem_of(selection.problem.operation, arrays, spec)
                chosen = plan.select(problem, platform=platform)
                with kernel_scope(chosen):
                    return compute(arrays, chosen.config, given)

            axes = self._letters(implementation, self.arrays_of(given), spec)
            function = opaque(
                merged, axes, axes, split=split, shared=self.shared, summed=summed, sliced=self.sliced
            )
            return function(given)

        return launch

    def _letters(self, implementation: Any, arrays: Any, spec: Any) -> Letters:
        """The axes of whatever a launch takes or gives."""
        axes = self.axes_of(arrays, spec)
        saved = {f"{_SAVED}{name}": x for name, x in self.saved_of(implementation, arrays, spec).items()}
        moved = {f"{what}{name}": x for what in (_COTANGENT, _GRADIENT) for name, x in axes.items()}
        return axes | saved | moved


class StepKind(Kind):
    """A kind whose kernels have no backward: one token of every row. Its gradient is that of the plain mathematics."""

    def plainly(self, platform: Any, arrays: Any, spec: Any, config: Any) -> Any:
        return platform.step(arrays, spec, config)

    def _opaque(self, plan: Plan, selection: Selection, spec: Any) -> Callable[[Named], Named]:
        implementation, launch = selection.implementation.load(), self._launcher(plan, selection, spec)

        def step(arrays: Any, config: Any, rest: Named) -> Named:
            return self.by_name(implementation.step(arrays, spec, config))

        def reference(floats: Named, others: Named) -> Named:
            arrays = self.make(**floats, **others)
            results = self.by_name(self.reference(arrays, spec))
            return results | {"out": results["out"].astype(getattr(arrays, self.learned[0]).dtype)}

        @jax.custom_vjp
        def call(given: Named) -> Named:
            return launch(step, given)

        def call_forward(given: Named) -> tuple[Named, Named]:
            return call(given), given

        def call_backward(given: Named, cotangents: Named) -> tuple[dict[str, Array | None]]:
            floats = {name: x for name, x in given.items() if name in self.learned}
            others = {name: x for name, x in given.items() if name not in self.learned}
            _, pull = jax.vjp(lambda floats: reference(floats, others), floats)
            (grads,) = pull(cotangents)
            return ({name: grads.get(name) for name in given},)

        call.defvjp(call_forward, call_backward)
        return call


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ForwardKind(Kind):
    """A kind without a gradient, for inference: `forward(arrays, spec, config)` on every platform.

    - `refusal`: why there is none, and what to do.
    - `wanted(spec)`: the results that leave a call; others may be infinite, which the setting `jax_debug_infs` would see.
    """

    refusal: tuple[str, str]
    wanted: Callable[[Any], tuple[str, ...]]

    def _call(self, plan: Plan, operation: str, spec: Any, arrays: Any) -> Named:
        selection = plan.select(self.problem_of(operation, arrays, spec))
        implementation, given = selection.implementation.load(), given_of(arrays)
        if is_opaque(implementation):
            launch = self._launcher(plan, selection, spec)
            forward = lambda arrays, config, rest: self.by_name(implementation.forward(arrays, spec, config))
            function, given = functools.partial(launch, forward), match_varying(given, given)
        else:

            def function(given: Named) -> Named:
                with kernel_scope(selection):
                    return implementation.forward(self.make(**given), spec, selection.config)

        results = self.refused(operation, selection.platform, function)(given)
        return {name: results[name] for name in self.wanted(spec)}

    def refused(
        self, operation: str, platform: Platform, function: Callable[[Named], Named]
    ) -> Callable[[Named], Named]:
        """The function, with a clear error where it would be differentiated."""
        call, (reason, remedy) = jax.custom_jvp(function), self.refusal

        @call.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise UnsupportedError(operation, {platform: reason}, remedy)

        return call


def is_opaque(platform: Any) -> bool:
    """Whether JAX cannot look into its kernels."""
    return hooks_of(platform).OPAQUE


def _with(prefix: str, given: Named) -> Named:
    return {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}


def like(grad: Array, x: Array) -> Array:
    """A gradient in its array's dtype and shape: what a shared array got from each leading axis is summed, in float32."""
    if grad.ndim > x.ndim:
        grad = jnp.sum(grad, tuple(range(grad.ndim - x.ndim)))
    return match_sharding(grad.astype(x.dtype), x)
