"""The common path from an operation to a kernel: choose, differentiate, fold mapped and leading axes, split over a mesh, launch.

A family declares its kinds of calls. A platform implements one of

- `apply(arrays, spec, config)`, with any leading axes: JAX differentiates it;
- `forward(arrays, spec, config, *, save)`, which returns the results by name and, with `save`, the residuals of its backward,
  and `backward(arrays, spec, config, saved, cotangents)`, which returns the gradients of all float arrays of the call by name. Both receive
  exactly one leading axis on all arrays except shared ones; on broadcast arrays it may have size one;

and `step(arrays, spec, config)` for a family with steps. Results of `apply` and `step` are returned by name or in order.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import UnsupportedError
from .._jitted import jitted
from .._kernel import Plan
from ..dispatch import BOTH, FORWARD, PlatformHooks, Problem, replaceable, Selection
from ..dispatch.labels import kernel_scope
from ..parallel import (
    given_of,
    how_split,
    Leading,
    mapped,
    match_sharding,
    match_varying,
    opaque,
    over_mesh,
    wide,
)
from .fold_first import fold_first

T = TypeVar("T")
Named = dict[str, Array]
Letters = dict[str, tuple[str, ...]]
Call = Callable[[Named], Named]

FORWARD_MODE = "Build it with platform='xla' for forward mode and second derivatives."
"""The remedy for operations whose XLA platform JAX differentiates itself."""

# Prefixes of the names of arrays that are neither arguments nor results.
_SAVED, _COTANGENT, _GRADIENT = "saved ", "cotangent ", "gradient "


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """Holds what all calls of a kind have in common.

    - `make`: builds the argument of platforms, such as a NamedTuple, from a call's arrays by name; absent arrays are not passed.
    - `problem_of(operation, arrays, spec)`: the problem of a call with these shapes.
    - `axes_of(arrays, spec)`: the axes after the leading ones of every possible array and every result, in the format of `parallel.opaque`.
    - `reference(arrays, spec)`: the reference results, in float32 or wider.
    - `results`: their names, the first being `out`.
    - `learned`: the arrays that have gradients if they are float.
    - `shared`, `broadcast`, `kept`, `one_by_one`: for leading axes, as in `parallel.Leading`.
    - `summed`: shared arrays whose gradients a kernel sums over the leading axes. If one of them, or a kept array that is learned, is
      given, `vmap` folds the whole call before anything differentiates it.
    - `saved_of(platform, arrays, spec)`: the axes after the leading ones of what a forward kernel saves for the backward.
    - `read`: the results that the backward also reads. Those in `unbounded` may be infinite.
    - `wanted(spec)`: the results that a call returns.
    - `names`: the names of results in policies of `jax.checkpoint` and, as `"saved"`, of residuals; by default operation and result, or `saved`.
    - `sliced`: whether a mesh may slice heads out of whole arrays, as in `parallel.partitioned`.
    - `partial(arrays, spec)`: whether a mesh may split an axis that the results lack; they are then sums over devices, as gradients are.
    - `combined`: whether a launch also sums its gradients over the axes in `pinned` itself.
    - `symbolic_zeros`: whether a backward is called without the cotangents that JAX knows to be zero.
    - `remedy`: the remedy in the error that forward mode raises for kernels with reverse mode only.
    """

    make: Callable[..., Any]
    problem_of: Callable[[str, Any, Any], Problem]
    axes_of: Callable[[Any, Any], Letters]
    reference: Callable[[Any, Any], Any]
    results: tuple[str, ...]
    learned: tuple[str, ...]
    shared: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    one_by_one: bool = False
    summed: frozenset[str] = frozenset()
    saved_of: Callable[[Any, Any, Any], Letters] | None = None
    read: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    wanted: Callable[[Any], tuple[str, ...]] | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sliced: bool = True
    partial: Callable[[Any, Any], bool] | None = None
    combined: bool = False
    symbolic_zeros: bool = False
    remedy: str = FORWARD_MODE

    def call(self, plan: Plan, operation: str, arrays: Any, spec: Any) -> Named:
        """The results on the platform that the plan chooses."""
        # Outside `jit` this setting also checks the residuals.
        finite = bool(self.unbounded) and bool(getattr(jax.config, "jax_debug_infs"))  # noqa: B009, its type does not declare settings
        return jitted(self._call, plan, operation, spec, finite)(self.given_of(arrays))

    def in_order(self, plan: Plan, operation: str, arrays: Any, spec: Any) -> Any:
        """A tuple of all results, in their order."""
        return tuple(map(self.call(plan, operation, arrays, spec).__getitem__, self.results))

    def _call(self, plan: Plan, operation: str, spec: Any, finite: bool, given: Named) -> Named:
        problem = self.problem_of(operation, self.make(**given), spec)
        alone, both = [plan.select(problem, direction=direction) for direction in (FORWARD, BOTH)]

        on = functools.partial(self._on, plan, spec, finite)
        implementation = both.implementation.load()
        # JAX differentiates what it sees in any mode, and as often as it is asked to.
        is_seen = self.differentiates(implementation) and not is_opaque(implementation)
        if alone.platform is both.platform or is_seen:
            return on(both, given)
        given = reverse_only(match_varying(given, given), operation, both.platform, self.remedy)
        return undifferentiated(functools.partial(on, alone), functools.partial(on, both))(given)

    def _on(self, plan: Plan, spec: Any, finite: bool, selection: Selection, given: Named) -> Named:
        """The wanted results on the selected platform."""
        platform, operation = selection.implementation.load(), selection.problem.operation
        leading = self.leading(self.axes_of(self.make(**given), spec))
        if self.differentiates(platform):
            config = selection.config
            plainly = lambda given: self.by_name(self.plainly(platform, self.make(**given), spec, config))
            with kernel_scope(selection):
                results = over_mesh(plainly, given, leading)
                # In the scope, so that the program names the choice even if nothing is computed.
                results = {n: checkpoint_name(x, self._name(operation, n)) for n, x in results.items()}
        else:
            # Inside `shard_map` a gradient varies over every axis that any array varies over, so its array must too.
            given = reverse_only(match_varying(given, given), operation, selection.platform, self.remedy)
            call = self._reversible(plan, selection, spec, finite)
            if not self.is_launched(platform):
                call = functools.partial(over_mesh, call, leading=leading)
            first = (self.summed | self.kept & set(self.learned)) & given.keys()
            results = fold_first(call, given, leading) if first else call(given)
        return {name: results[name] for name in (self.wanted(spec) if self.wanted else self.results)}

    # What a family may override

    def given_of(self, arrays: Any) -> dict[str, Any]:
        """The arrays of a call by name."""
        return given_of(arrays)

    def differentiates(self, platform: Any) -> bool:
        """Returns whether JAX differentiates the platform, because it sees what is computed."""
        return hasattr(platform, "apply") or (not is_opaque(platform) and not hasattr(platform, "backward"))

    def has_backward(self, platform: Any) -> bool:
        """Returns whether the platform has a backward; without one the gradient is that of the reference."""
        return True

    def is_launched(self, platform: Any) -> bool:
        """Returns whether a call is folded into one launch and split over devices by hand, as kernels are that JAX cannot see into."""
        return is_opaque(platform)

    def pinned(self, spec: Any) -> Mapping[str, str]:
        """Axes that devices always split, and over which mesh axis, because a launch exchanges their parts itself."""
        return {}

    def remarked(self, selection: Selection, arrays: Any, spec: Any) -> Selection:
        """The choice for a launch, with what `explain` should say of it besides."""
        return selection

    def plainly(self, platform: Any, arrays: Any, spec: Any, config: Any) -> Any:
        """The results on a platform that JAX differentiates."""
        return platform.apply(arrays, spec, config)

    def forward(self, platform: Any, arrays: Any, spec: Any, config: Any, save: bool) -> Named:
        """The results and residuals on a platform that JAX does not differentiate."""
        return dict(platform.forward(arrays, spec, config, save=save))

    def backward(
        self, platform: Any, arrays: Any, spec: Any, config: Any, saved: Named, cotangents: Named
    ) -> Named:
        return platform.backward(arrays, spec, config, saved, cotangents)

    def kept_gradients(self, arrays: Any, spec: Any, saved: Named, cotangents: Named) -> Named:
        """The gradients, where they follow from what the forward has saved without a launch; else nothing. Arrays have any leading axes."""
        return {}

    def told(self, spec: Any, runs: Mapping[str, int], over: tuple[str, ...]) -> Any:
        """The spec of one launch, with the number of rows that read each row of a kept array, or the mapped axes that its gradient is summed
        over."""
        return spec

    # Implementation

    def leading(self, axes: Letters) -> Leading:
        like = {f"{_GRADIENT}{name}": name for name in self.learned}
        rows = {"shared": self.shared, "broadcast": self.broadcast, "kept": self.kept}
        return Leading(axes=axes, like=like, one_by_one=self.one_by_one, **rows)

    def by_name(self, results: Any) -> Named:
        named = results if isinstance(results, Mapping) else zip(self.results, results, strict=True)
        return dict(named)

    def arrays_of(self, given: Named) -> Any:
        """The arrays of a call, without others that are passed along."""
        return self.make(**{name: x for name, x in given.items() if " " not in name})

    def _reversible(self, plan: Plan, selection: Selection, spec: Any, finite: bool) -> Call:
        """The call of a platform that JAX cannot differentiate, as a function of its arrays."""
        operation, platform = selection.problem.operation, selection.implementation.load()
        launch = self._launcher(plan, selection, spec)

        def forward(save: bool, arrays: Any, spec: Any, config: Any, rest: Named) -> Named:
            results = self.forward(platform, arrays, spec, config, save)
            named = {name: results.pop(name) for name in self.results}
            return named | {f"{_SAVED}{name}": x for name, x in results.items() if save}

        def backward(arrays: Any, spec: Any, config: Any, rest: Named) -> Named:
            saved, cotangents = _with(_SAVED, rest), _with(_COTANGENT, rest)
            grads = self.backward(platform, arrays, spec, config, saved, cotangents)
            return {f"{_GRADIENT}{name}": x for name, x in grads.items()}

        def call_forward(given: Named) -> tuple[Named, Named]:
            results = launch(functools.partial(forward, self.has_backward(platform)), given)
            results = {name: checkpoint_name(x, self._name(operation, name)) for name, x in results.items()}
            saved = {name: results.pop(name) for name in list(results) if name not in self.results}
            kept = {name: results[name] for name in self.read}
            if finite:
                kept |= {name: jnp.maximum(kept[name], _least(kept[name])) for name in self.unbounded}
            return results, saved | {f"{_SAVED}{name}": x for name, x in kept.items()}

        def call_backward(given: Named, saved: Named, cotangents: Named) -> Named:
            cotangents = {name: x for name, x in cotangents.items() if is_float(x)}
            if kept := self.kept_gradients(self.arrays_of(given), spec, _with(_SAVED, saved), cotangents):
                return kept
            if not self.has_backward(platform):
                return self._of_reference(spec, given, cotangents)
            for name in self.unbounded if finite else ():
                x = saved[f"{_SAVED}{name}"]
                saved = saved | {f"{_SAVED}{name}": jnp.where(x == _least(x), -jnp.inf, x)}
            named = {f"{_COTANGENT}{name}": x for name, x in cotangents.items()}
            return _with(_GRADIENT, launch(backward, given | saved | named, summed=True))

        learned = frozenset(self.learned)
        return reversible(
            functools.partial(launch, functools.partial(forward, False)),
            call_forward,
            call_backward,
            learned,
            self.symbolic_zeros,
        )

    def _of_reference(self, spec: Any, given: Named, cotangents: Named) -> Named:
        """The gradients of the reference."""
        floats = {name: x for name, x in given.items() if name in self.learned and is_float(x)}

        def reference(floats: Named) -> Named:
            results = self.by_name(self.reference(self.make(**given | floats), spec))
            return {name: results[name] for name in cotangents}

        results, pull = jax.vjp(reference, floats)
        return pull({name: x.astype(results[name].dtype) for name, x in cotangents.items()})[0]

    def _name(self, operation: str, name: str) -> str:
        key = "saved" if name.startswith(_SAVED) else name
        return self.names.get(key, f"{operation}_{key}")

    def _launcher(self, plan: Plan, selection: Selection, spec: Any) -> Callable[..., Named]:
        """`launch(compute, given)`: `compute(arrays, spec, config, rest)` over all leading axes; for an opaque platform as one launch, folded
        and split. The configuration is chosen for the shapes of the launch."""
        platform, implementation = selection.platform, selection.implementation.load()
        split, is_launched = how_split(platform, plan.here.device), self.is_launched(implementation)
        operation = selection.problem.operation
        rows = self.broadcast & set(self.learned)

        def choose(arrays: Any) -> Selection:
            """The choice for the shapes of the launch, in which all leading axes are merged."""
            problem = self.problem_of(operation, arrays, spec)
            return selection if problem == selection.problem else plan.select(problem, platform=platform)

        def launch(compute: Callable[..., Named], given: Named, summed: bool = False) -> Named:
            def of_rows(given: Named, told: Any) -> Named:
                arrays = self.arrays_of(given)
                chosen = choose(arrays) if is_launched else selection
                runs, over = (told, ()) if is_launched else ({}, told if summed else ())
                own = self.told(spec, runs, over)
                with kernel_scope(self.remarked(chosen, arrays, own)):
                    results = compute(arrays, own, chosen.config, given)
                    if is_launched:
                        return results
                    return {name: checkpoint_name(x, operation) for name, x in results.items()}

            arrays = self.arrays_of(given)
            axes = self.axes_of(arrays, spec)
            saved = axes | (self.saved_of(implementation, arrays, spec) if self.saved_of else {})
            moved = {f"{what}{name}": x for what in (_COTANGENT, _GRADIENT) for name, x in axes.items()}
            leading = self.leading(axes | {f"{_SAVED}{name}": x for name, x in saved.items()} | moved)
            if not is_launched:
                return mapped(of_rows, leading, self.kept & set(self.learned))(given)
            if summed:
                # Materialised for every row, so that a kernel split over rows need not sum their gradients.
                lead = leading.lead(given)
                given = given | {
                    name: jnp.broadcast_to(given[name], (*lead, *given[name].shape[len(lead) :]))
                    for name in rows - self.kept & given.keys()
                }
            return opaque(
                of_rows,
                leading,
                split=split,
                whole=rows if summed else frozenset(),
                summed=summed or (self.partial is not None and self.partial(arrays, spec)),
                sliced=self.sliced,
                pinned=self.pinned(spec),
                combined=self.combined,
                seen=not is_opaque(implementation),
            )(given)

        return launch


def is_opaque(platform: Any) -> bool:
    """Returns whether JAX cannot see into its kernels."""
    return getattr(platform, "OPAQUE", PlatformHooks.OPAQUE)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def reversible(
    function: Call,
    forward: Callable[[Named], tuple[Named, Named]],
    backward: Callable[[Named, Named, Named], Named],
    learned: frozenset[str],
    symbolic_zeros: bool = False,
) -> Call:
    """`function` with a custom reverse-mode derivative: `forward(given)` returns the results and the residuals, from which
    `backward(given, saved, cotangents)` computes the gradients of the `learned` arrays by name; with `symbolic_zeros`, without the cotangents
    that are known to be zero."""

    @jax.custom_vjp
    def call(given: Named) -> Named:
        return function(given)

    def call_forward(given: Any) -> tuple[Named, tuple[Named, Named]]:
        given = {name: x.value for name, x in given.items()} if symbolic_zeros else given
        results, saved = forward(given)
        return results, (given, saved)

    def call_backward(residuals: tuple[Named, Named], cotangents: Any) -> tuple[dict[str, Array | None]]:
        given, saved = residuals
        cotangents = {name: x for name, x in cotangents.items() if not isinstance(x, SymbolicZero)}
        grads = backward(given, saved, cotangents)
        live = {name for name in learned & given.keys() if is_float(given[name])}
        return ({name: like(grads[name], x) if name in live else None for name, x in given.items()},)

    call.defvjp(call_forward, call_backward, symbolic_zeros=symbolic_zeros)
    return call


def undifferentiated(alone: Call, function: Call) -> Call:
    """`function`, except that where nothing is differentiated `alone` computes its results."""
    heard: list[Callable[[], None]] = []

    @jax.custom_vjp
    def call(given: Named) -> Named:
        with replaceable() as take_back:
            results = alone(given)
        heard.append(take_back)
        return results

    def call_forward(given: Named) -> tuple[Named, Any]:
        for take_back in heard:
            take_back()
        return jax.vjp(function, given)

    def call_backward(pull: Any, cotangents: Named) -> Any:
        return pull(cotangents)

    call.defvjp(call_forward, call_backward)
    return call


def _least(x: Array) -> Any:
    return jnp.finfo(x.dtype).min


def _with(prefix: str, given: Named) -> Named:
    return {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}


def like(grad: Array, x: Array) -> Array:
    """A gradient in its array's dtype and shape, summed in float32 over leading axes that the array shares or broadcasts."""
    rows = tuple(range(grad.ndim - x.ndim))
    if rows:
        grad = jnp.sum(wide(grad), rows)
    ones = tuple(i for i, (size, own) in enumerate(zip(grad.shape, x.shape, strict=True)) if size != own)
    if ones:
        grad = jnp.sum(wide(grad), ones, keepdims=True)
    return match_sharding(grad.astype(x.dtype), x)


# A function with a custom reverse derivative cannot customise the error that JAX raises in forward mode. So the arrays of such a call first pass
# through a primitive: in reverse mode nothing happens; in forward mode their tangents would have to be computed, which raises.

_mark_p = Primitive("ejkernel_reverse_only")
_tangent_p = Primitive("ejkernel_reverse_only_tangent")


def reverse_only(arrays: T, operation: str, platform: str, remedy: str) -> T:
    """Returns `arrays` (any pytree); raises `UnsupportedError` with this remedy if they are differentiated in forward mode.

    All arrays of a call pass through together, so that an outer derivative treats an inner gradient as before.
    """
    leaves, structure = jax.tree.flatten(arrays)
    marked = _mark_p.bind(*leaves, words=(operation, str(platform), remedy))
    return jax.tree.unflatten(structure, marked)


def _mark_jvp(leaves: Any, tangents: Any, *, words: Any) -> tuple[Any, Any]:
    return list(leaves), [t if isinstance(t, ad.Zero) else _tangent_p.bind(t, words=words) for t in tangents]


def _refuse(*_: Any, words: tuple[str, str, str]) -> Any:
    operation, platform, remedy = words
    why = "its kernels have reverse-mode derivatives only (jax.grad, jax.vjp), none in forward mode (jax.jvp, jax.jacfwd)"
    raise UnsupportedError(operation, {platform: why}, remedy)


_mark_p.multiple_results = True
_mark_p.def_impl(lambda *leaves, words: list(leaves))
_mark_p.def_abstract_eval(lambda *leaves, words: list(leaves))
mlir.register_lowering(_mark_p, lambda context, *leaves, words: leaves)
ad.primitive_jvps[_mark_p] = _mark_jvp
batching.primitive_batchers[_mark_p] = lambda leaves, axes, *, words: (
    _mark_p.bind(*leaves, words=words),
    axes,
)

# In reverse mode, where tangents are transposed, this is never computed.
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent, *, words: tangent)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda cotangent, tangent, *, words: [cotangent])
# Forward mode under `vmap`: otherwise JAX's own error would come first.
batching.primitive_batchers[_tangent_p] = lambda leaves, axes, *, words: _refuse(words=words)
