"""The leading axes of a call's arrays: which array has which, how JAX maps over them, and how they are merged into the one that a kernel sees: of
a kernel that the compiler cannot see into, any number of them is one launch, folded under `vmap` and split over devices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from ..dispatch import replaceable
from .layout import Axes, heads_among, is_split, is_whole
from .mesh import explicit_mesh, inside_manual_mesh, output_shapes, Split
from .partition import over_explicit_mesh, partitioned, refuse_partly_manual

Arrays = dict[str, Array]
Letters = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Leading:
    """The leading axes of the arrays of a call, by name.

    - `axes`: the axes after the leading ones of every possible array and result.
    - `shared`: arrays without leading axes.
    - `broadcast`: arrays whose leading axes may each have size one instead of the full size. Arrays named `x.y` and `x.z` have the same
      leading axes.
    - `kept`: the broadcast arrays that a kernel reads at their own size. It is told how many consecutive batch rows read each of their rows.
    - `like`: results that have the axes of an array (gradients).
    - `one_by_one`: whether calls are made one after the other if a shared array is mapped; else the kernel takes it with a leading axis.
    """

    axes: Letters
    shared: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    like: Mapping[str, str] = dataclasses.field(default_factory=dict)
    one_by_one: bool = False

    def is_alone(self, name: str, x: Any) -> bool:
        """Returns whether an array has no leading axes, because there are none or it is shared."""
        return self.like.get(name, name) in self.shared and x.ndim == len(self.axes[name])

    def shape(self, name: str, x: Any) -> tuple[int, ...]:
        return x.shape[: len(x.shape) - len(self.axes[name])]

    def lead(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """The leading axes of the call."""
        name, lead = "", ()
        for other, x in arrays.items():
            if other in self.broadcast or self.is_alone(other, x):
                continue
            if not name:
                name, lead = other, self.shape(other, x)
            assert lead == self.shape(other, x), f"leading axes differ: {name} {lead}, {other} {x.shape}"
        return lead

    def labels(
        self,
        arrays: Mapping[str, Any],
        heads: tuple[str, ...],
        lead: tuple[int, ...],
        pinned: Mapping[str, str] | None = None,
    ) -> dict[str, Axes]:
        """The name of every axis; `None` if it is broadcast."""

        def label(name: str, x: Any) -> Axes:
            own, letters = self.shape(name, x), self.axes[name]
            first = (f"b{i}" if size == lead[i] else None for i, size in enumerate(own))
            rest = zip(letters, x.shape[len(own) :], strict=True)
            # A pinned axis of size one is an axis like any other, unless arrays may broadcast it.
            always = () if self.like.get(name, name) in self.broadcast else pinned or ()
            names = (*first, *(n if n in always or is_whole(n, size, heads) else None for n, size in rest))
            every = (*(f"b{i}" for i in range(len(own))), *letters)
            return Axes(
                names, tuple(n if size == 1 else None for n, size in zip(every, x.shape, strict=True))
            )

        return {name: label(name, x) for name, x in arrays.items()}


def merged(function: Callable[..., Arrays], arrays: Arrays, leading: Leading) -> Arrays:
    """Calls `function(arrays, runs)` with all leading axes merged into one, and restores them in its results.

    `runs`: for each kept array, how many consecutive batch rows read one of its rows.
    """
    lead = leading.lead(arrays)
    # The leading axes that a kept array does not broadcast.
    long = lambda x: frozenset([i for i, size in enumerate(lead) if x.shape[i] == size != 1])
    kept = {name: long(arrays[name]) for name in sorted(leading.kept & arrays.keys())}
    order = _order(lead, *kept.values())

    def merge(name: str, x: Array) -> Array:
        if leading.is_alone(name, x):
            return x
        own = leading.shape(name, x)
        core = x.shape[len(own) :]
        if name not in kept and own != lead and any(size != 1 for size in own):
            own, x = lead, jnp.broadcast_to(x, (*lead, *core))
        return _ordered(x, order).reshape((math.prod(own), *core))

    def split(name: str, x: Array) -> Array:
        source = arrays.get(leading.like.get(name, ""))
        if leading.is_alone(name, x):
            return x
        own = lead
        if source is not None and not leading.is_alone(leading.like[name], source):
            own = source.shape[: len(lead)]
        own = own if x.shape[0] == math.prod(own) else lead
        x = x.reshape((*[own[axis] for axis in order], *x.shape[1:]))
        return _ordered(x, tuple(map(order.index, range(len(order)))))

    runs = {name: _run(lead, order, own) for name, own in kept.items()}
    results = function({name: merge(name, x) for name, x in arrays.items()}, runs)
    return {name: split(name, x) for name, x in results.items()}


def _order(lead: tuple[int, ...], *kept: frozenset[int]) -> tuple[int, ...]:
    """An order of the leading axes in which those of each kept array are contiguous."""
    axes = tuple(range(len(lead)))
    long = [i for i in axes if lead[i] != 1]
    if not [own for own in kept if not _follow(long, own)]:
        return axes
    first, second = (*kept, frozenset[int]())[:2]
    key = lambda i: (i not in first | second, i not in first, (i in first) == (i in second))
    return tuple(sorted(axes, key=key))


def _follow(axes: Sequence[int], own: frozenset[int]) -> bool:
    places = [place for place, axis in enumerate(axes) if axis in own]
    return not places or places[-1] - places[0] == len(places) - 1


def _run(lead: tuple[int, ...], order: tuple[int, ...], own: frozenset[int]) -> int:
    """The number of consecutive merged rows differ only in axes after those of an array."""
    last = max((place for place, axis in enumerate(order) if axis in own), default=len(order))
    return math.prod(lead[axis] for axis in order[last + 1 :])


def _ordered(x: Array, order: tuple[int, ...]) -> Array:
    """The first axes in another order."""
    if order == tuple(range(len(order))):
        return x
    return jnp.transpose(x, (*order, *range(len(order), x.ndim)))


def widened(
    arrays: Arrays,
    is_mapped: Mapping[str, bool],
    size: int,
    leading: Leading,
    whole: frozenset[str] = frozenset(),
) -> Arrays:
    """The arrays with a mapped axis of `size` in front. Unmapped broadcast arrays get one of size one, except for the `whole` ones."""
    groups = {name.partition(".")[0] for name in arrays if is_mapped[name]}
    first = next(name for name in arrays if name not in leading.shared | leading.broadcast)
    lead = leading.shape(first, arrays[first])[is_mapped[first] :]

    def widen(name: str, x: Array) -> Array:
        own = x.shape[1:] if is_mapped[name] else x.shape
        if name in leading.shared and len(own) == len(leading.axes[name]):
            ones = (1,) * len(lead)
            return (
                jnp.broadcast_to(x.reshape((size, *ones, *own)), (size, *lead, *own))
                if is_mapped[name]
                else x
            )
        if is_mapped[name]:
            return x
        some = name in leading.broadcast - whole and name.partition(".")[0] not in groups
        return jnp.broadcast_to(x, (1 if some else size, *x.shape))

    return {name: widen(name, x) for name, x in arrays.items()}


def mapped(
    function: Callable[..., Arrays], leading: Leading, inside: frozenset[str] = frozenset()
) -> Callable[[Arrays], Arrays]:
    """Extends a function of arrays with one leading axis to any number, for operations that the compiler sees into. JAX maps it over all
    but the last; none are merged, as they may be sharded.

    `function(arrays, over)` sums the gradients of the arrays `inside` over the mapped axes named in `over` that these arrays broadcast.
    """

    def call(arrays: Arrays, over: tuple[str, ...] = ()) -> Arrays:
        lead = leading.lead(arrays)
        if not lead:
            # Kernels expect one leading axis, so a call without any gets one of size 1.
            rows = {name: x if leading.is_alone(name, x) else x[None] for name, x in arrays.items()}
            return {
                name: x if leading.is_alone(name, x) else x[0] for name, x in function(rows, over).items()
            }
        if len(lead) == 1:
            return function(arrays, over)
        alone = {name for name, x in arrays.items() if leading.is_alone(name, x)}
        short = {name for name, x in arrays.items() if x.ndim and x.shape[0] == 1 != lead[0]}
        first = (short & leading.broadcast) - alone
        axes = {name: None if name in alone | first else 0 for name in arrays}
        axis, summed = f"ejkernel_eqx.leading_{len(lead)}", inside & first

        def one(arrays: Arrays) -> tuple[Arrays, Arrays]:
            results = call(arrays, (*over, axis) if summed else over)
            sums = {name: results.pop(name) for name in list(results) if leading.like.get(name) in summed}
            return results, sums

        # A broadcast axis of size 1 is dropped, as `vmap` does not map over it.
        given = {name: x[0] if name in first else x for name, x in arrays.items()}
        results, sums = jax.vmap(one, in_axes=(axes,), out_axes=(0, None), axis_name=axis)(given)
        for name in results:
            source = leading.like.get(name)
            if source in alone | first:
                # An array that rows share has the sum of their gradients.
                results[name] = jnp.sum(wide(results[name]), axis=0, keepdims=source in first)
        return results | {name: x[None] for name, x in sums.items()}

    return call


def wide(x: Array) -> Array:
    """A float array in float32 or wider; any other array unchanged."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def opaque(
    function: Callable[..., Arrays],
    leading: Leading,
    *,
    split: Split,
    whole: frozenset[str] = frozenset(),
    summed: bool = False,
    sliced: bool = True,
    pinned: Mapping[str, str] | None = None,
    combined: bool = False,
    seen: bool = False,
) -> Callable[[Arrays], Arrays]:
    """Extends `function(arrays, runs)`, which takes and returns arrays by name with exactly one leading axis (except as specified in
    `leading`), to any number of leading axes, including none, and folds every `jax.vmap` into them.

    Equal names denote the same axis. Names `H<n>` are n heads; they are split over devices together if every output has them and all
    counts divide. `split` determines the meshes on which it is split over devices; `summed`, `sliced`, `pinned` and `combined` are
    as in `Layout`. `seen`: the compiler sees into the function after all, so it may run where only some axes of a mesh are manual.
    The `whole` broadcast arrays are materialised when `jax.vmap` maps others, because a gradient is needed for every example.
    """

    folded = functools.partial(merged, function, leading=leading)

    def over_devices(arrays: Arrays) -> Arrays:
        if inside_manual_mesh():
            if not seen:
                refuse_partly_manual()
            return folded(arrays)
        outs, lead = output_shapes(folded, arrays), leading.lead(arrays)
        heads = heads_among([leading.axes[name] for name in (*arrays, *outs)])
        return partitioned(
            folded,
            (arrays,),
            (leading.labels(arrays, heads, lead, pinned),),
            outs,
            leading.labels(outs, heads, lead, pinned),
            split=is_split,
            group=heads,
            meshes=split,
            summed=summed,
            sliced=sliced,
            pinned=pinned or {},
            combined=combined,
        )

    launched = folded if split is Split.NOWHERE else over_devices

    def call(arrays: Arrays) -> Arrays:
        return under_vmap(launched, rule)(arrays)

    def rule(size: int, is_mapped: Mapping[str, bool], arrays: Arrays) -> Arrays:
        wide = widened(arrays, is_mapped, size, leading, whole)
        if leading.one_by_one and not _maps_all(folded, leading, wide, is_mapped):
            return _one_by_one(call, arrays, is_mapped)
        return call(wide)

    return call


def under_vmap(function: Callable[[Any], Any], rule: Callable[[int, Any, Any], Any]) -> Callable[[Any], Any]:
    """`function(arrays)`, in whose place `jax.vmap` computes `rule(size, is_mapped, arrays)`, whose results are all mapped. The choices of the
    unmapped call, which is traced but never launched, are withdrawn."""
    replaced: list[Callable[[], None]] = []

    @custom_vmap
    def call(arrays: Any) -> Any:
        with replaceable() as take_back:
            replaced.append(take_back)
            return function(arrays)

    @call.def_vmap
    def mapped_call(size: int, in_batched: list[Any], arrays: Any) -> tuple[Any, Any]:
        for take_back in replaced:
            take_back()
        results = rule(size, in_batched[0], arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _maps_all(
    folded: Callable[[Arrays], Arrays], leading: Leading, wide: Arrays, is_mapped: Mapping[str, bool]
) -> bool:
    """Returns whether no shared array is mapped, and every result has the leading axes and is one of a call alone, too."""
    if any(is_mapped[name] for name in leading.shared & wide.keys()):
        return False
    if not (leading.like and leading.shared & wide.keys()):
        return True
    outs = output_shapes(folded, wide)
    if any(leading.is_alone(name, x) for name, x in outs.items()):
        return False
    shape_of = lambda name, x: x.shape if leading.is_alone(name, x) else x.shape[1:]
    alone = {name: jax.ShapeDtypeStruct(shape_of(name, x), x.dtype) for name, x in wide.items()}
    return outs.keys() == output_shapes(folded, alone).keys()


def _one_by_one(call: Callable[[Arrays], Arrays], arrays: Arrays, is_mapped: Mapping[str, bool]) -> Arrays:
    fixed = {name: x for name, x in arrays.items() if not is_mapped[name]}
    over = {name: x for name, x in arrays.items() if is_mapped[name]}
    in_order = lambda mapped: {name: mapped[name] if is_mapped[name] else fixed[name] for name in arrays}
    return jax.lax.map(lambda mapped: call(in_order(mapped)), over)


def given_of(arrays: Any) -> dict[str, Any]:
    """The arrays present in a NamedTuple of arrays, by name."""
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def over_mesh(function: Callable[[Arrays], Arrays], arrays: Arrays, leading: Leading) -> Arrays:
    """`function(arrays)` for operations that the compiler sees into; on an explicit mesh, outputs are split by the axes named in
    `leading`."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(arrays)
    heads, lead = heads_among(leading.axes.values()), leading.lead(arrays)
    labels = lambda arrays: leading.labels(arrays, heads, lead)
    return over_explicit_mesh(mesh, function, arrays, labels(arrays), labels, heads)
