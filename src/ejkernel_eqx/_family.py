"""Families of operations whose backward needs nothing but their inputs: choice, differentiation, and the work to tune them by.

A platform whose kernels JAX differentiates itself (XLA) has `apply(arrays, spec, config)`; an opaque one has
`forward(arrays, spec, config, *, execute)` and `backward(arrays, spec, config, cotangents, *, execute)`, which gives the gradient of every
float array that there is. Both give results by name; arrays of an opaque platform have exactly one leading axis, but for shared ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ._jitted import jitted
from ._kernel import Plan
from ._reverse_only import FORWARD_MODE, reverse_only
from ._tolerances import TOLERANCES
from .dispatch import (
    announce,
    BOTH,
    Cost,
    FORWARD,
    Implementation,
    listening,
    Part,
    Platform,
    Problem,
    Selection,
    withdraw,
    Workload,
)
from .dispatch.labels import kernel_scope
from .parallel import given_of, how_split, match_sharding, match_varying, opaque, over_mesh

Named = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """What the calls of one family have in common.

    - `make`: the NamedTuple class of a call's arrays; what a call does not have is `None`.
    - `problem_of(operation, arrays, spec)`: the problem of a call of these shapes.
    - `axes_of(arrays)`: the axes behind the leading ones of every array that there may be and of every result, as `parallel.opaque` has them.
    - `reference(arrays, spec)`: the results by the plain mathematics, in float32 or wider.
    - `results`: their names, the first `out`.
    - `learned`: the arrays that gradients are taken in.
    - `shared`: those without leading axes.
    """

    make: Callable[..., Any]
    problem_of: Callable[[str, Any, Any], Problem]
    axes_of: Callable[[Any], dict[str, tuple[str, ...]]]
    reference: Callable[[Any, Any], Named]
    results: tuple[str, ...]
    learned: tuple[str, ...]
    shared: frozenset[str]

    def call(self, plan: Plan, operation: str, arrays: Any, spec: Any) -> Named:
        """The results on the platform that the plan chooses: the only way from an operation to a kernel."""
        return jitted(self._call, plan, operation, spec)(arrays)

    def _call(self, plan: Plan, operation: str, spec: Any, arrays: Any) -> Named:
        selection = plan.select(self.problem_of(operation, arrays, spec), quiet=True)
        platform = selection.implementation.load()
        given = given_of(arrays)
        if getattr(platform, "OPAQUE", False):
            given = reverse_only(match_varying(given, given), operation, selection.platform, FORWARD_MODE)
            return self._differentiable(plan, selection, spec)(given)
        with kernel_scope(announce(selection)):
            transparent = lambda given: platform.apply(self.make(**given), spec, selection.config)
            return over_mesh(transparent, given, self.axes_of(arrays))

    def _differentiable(self, plan: Plan, selection: Selection, spec: Any) -> Callable[[Named], Named]:
        """The call of an opaque platform as a function of its arrays."""
        platform, implementation = selection.platform, selection.implementation.load()
        split = how_split(platform, plan.device)

        def choose(given: Named) -> tuple[Any, Selection]:
            """By the shapes of the launch: all leading axes are merged by now."""
            arrays = self.make(**{name: x for name, x in given.items() if not name.startswith("d_")})
            problem = self.problem_of(selection.problem.operation, arrays, spec)
            return arrays, plan.select(problem, platform=platform)

        def forward(given: Named) -> Named:
            arrays, chosen = choose(given)
            with kernel_scope(chosen):
                return implementation.forward(arrays, spec, chosen.config)

        def backward(given: Named) -> Named:
            arrays, chosen = choose(given)
            cotangents = {name: given[f"d_{name}"] for name in self.results}
            with kernel_scope(chosen):
                grads = implementation.backward(arrays, spec, chosen.config, cotangents)
            return {f"d_{name}": x for name, x in grads.items()}

        def over_leading_axes(
            function: Callable[[Named], Named], given: Named, arrays: Named, summed: bool = False
        ) -> Named:
            axes = self.axes_of(self.make(**arrays))
            axes |= {f"d_{name}": letters for name, letters in axes.items()}
            wrapped = opaque(function, axes, axes, split=split, shared=self.shared, summed=summed)
            return wrapped(given)

        undifferentiated: list[Selection] = []

        @jax.custom_vjp
        def call(given: Named) -> Named:
            with listening(undifferentiated.append):
                return over_leading_axes(forward, given, given)

        def call_forward(given: Named) -> tuple[Named, Named]:
            for known in undifferentiated:
                withdraw(known)
            results = over_leading_axes(forward, given, given)
            operation = selection.problem.operation
            return {name: checkpoint_name(x, f"{operation}_{name}") for name, x in results.items()}, given

        def call_backward(given: Named, cotangents: Named) -> tuple[dict[str, Array | None]]:
            named = {f"d_{name}": x for name, x in cotangents.items()}
            grads = over_leading_axes(backward, given | named, given, summed=True)
            return ({name: _like(grads.get(f"d_{name}"), x) for name, x in given.items()},)

        call.defvjp(call_forward, call_backward)
        return call

    def workload(
        self,
        implementation: Implementation,
        problem: Problem,
        spec: Any,
        make_arrays: Callable[[int], Any],
        flops: float,
    ) -> Workload:
        """The work of a problem whose calls have this spec and arrays like those that `make_arrays(seed)` gives."""
        platform = implementation.load()
        inputs = functools.partial(self._make_inputs, spec, make_arrays)
        shapes = jax.eval_shape(lambda: inputs(0))
        learned = self._learned(shapes[0])
        dtype = jnp.dtype(shapes[1]["out"].dtype).name
        tolerances = dict.fromkeys(self.results, TOLERANCES[dtype]["forward"])
        is_opaque = getattr(platform, "OPAQUE", False)
        run = functools.partial(self._run if is_opaque else self._run_plain, platform, spec)
        given, moved = _bytes(shapes[0]), _bytes(shapes[1])
        gradients = _bytes([getattr(shapes[0], name) for name in learned])
        costs = {
            FORWARD: Cost(flops, given + moved),
            BOTH: Cost(3 * flops, 2 * (given + moved) + gradients),
        }
        return Workload(
            make_inputs=inputs,
            run=run,
            reference=functools.partial(self._reference, spec),
            tolerances=tolerances | dict.fromkeys(learned, TOLERANCES[dtype]["gradient"]),
            forward=self.results,
            parts=(Part("forward", self.results), Part("backward", learned)) if is_opaque else (),
            costs=costs,
            launches=functools.partial(self._launches, run, inputs)
            if implementation.platform is Platform.TRITON
            else None,
        )

    def _learned(self, arrays: Any) -> tuple[str, ...]:
        return tuple(name for name in self.learned if getattr(arrays, name) is not None)

    def _make_inputs(self, spec: Any, make_arrays: Callable[[int], Any], seed: int) -> tuple[Any, Named]:
        """The arrays of a call, and cotangents of its results."""
        arrays = make_arrays(seed)
        results = jax.eval_shape(lambda: self.reference(arrays, spec))
        keys = jax.random.split(jax.random.key(seed + 1, impl="rbg"), len(results))
        dtype = getattr(arrays, self.learned[0]).dtype
        return arrays, {
            name: jax.random.normal(key, results[name].shape, dtype) for key, name in zip(keys, self.results)
        }

    def _run(self, platform: Any, spec: Any, inputs: Any, config: Any, **execute: Any) -> Named:
        arrays, cotangents = inputs
        results = platform.forward(arrays, spec, config, **execute)
        grads = platform.backward(arrays, spec, config, cotangents, **execute)
        return results | {name: _like(x, getattr(arrays, name)) for name, x in grads.items()}

    def _run_plain(self, platform: Any, spec: Any, inputs: Any, config: Any) -> Named:
        return self.differentiate(lambda arrays: platform.apply(arrays, spec, config), *inputs)

    def _reference(self, spec: Any, inputs: Any) -> Named:
        arrays, cotangents = inputs
        return jax.jit(self.exact, static_argnums=0)(spec, arrays, cotangents)

    def exact(self, spec: Any, arrays: Any, cotangents: Named) -> Named:
        """Results and gradients by the reference in float32, or float64 if given it."""
        wide = functools.partial(jax.tree.map, _wide)
        return self.differentiate(lambda arrays: self.reference(arrays, spec), wide(arrays), wide(cotangents))

    def differentiate(self, function: Callable[[Any], Named], arrays: Any, cotangents: Named) -> Named:
        """Results and gradients of a function that JAX differentiates."""
        learned = {name: getattr(arrays, name) for name in self._learned(arrays)}
        results, pull = jax.vjp(lambda learned: function(arrays._replace(**learned)), learned)
        (grads,) = pull({name: cotangents[name].astype(x.dtype) for name, x in results.items()})
        return results | grads

    def _launches(self, run: Callable[..., Any], inputs: Callable[[int], Any], config: Any) -> list[Any]:
        """What forward and backward launch; nothing is run."""
        found: list[Any] = []

        def record(launch: Any, arrays: Mapping[str, Array]) -> Named:
            if not launch.is_empty:
                found.append(launch)
            return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

        jax.eval_shape(lambda: run(inputs(0), config, execute=record))
        return found


def _like(grad: Array | None, x: Array) -> Array | None:
    """A gradient in its array's dtype and shape: what a shared array got from each leading axis is summed, in float32."""
    if grad is None:
        return None
    grad = jnp.sum(grad, tuple(range(grad.ndim - x.ndim)))
    return match_sharding(grad.astype(x.dtype), x)


def _wide(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _bytes(tree: Any) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))
