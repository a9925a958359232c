"""A mixture of experts on one device or several: experts, their hidden features and tokens split over the axes of a mesh."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ...core.plans import has_simulated
from ...dispatch import Backend
from ...dispatch.device import place_of_calls
from ...matmul import Float8Weight
from ...parallel import match_varying
from ...parallel.mesh import explicit_mesh, inside_manual_mesh, resharded, spec_of
from ...quantised.dequantise import is_quantised
from ..projection import mesh_axes
from .by_token import collected, further_rounds, most_rows, room_of, routes_of, spread, through_experts
from .dispatch import combined, dispatched, order_of
from .exchange import match_varying_over, Ragged
from .statistics import RouterStatistics, statistics_of

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Over which axes of an automatic mesh a [`MixtureOfExperts`][ejkernel_eqx.nn.MixtureOfExperts] is split, which its arrays do not say there while
    a program is traced. On explicit meshes, `jax.make_mesh`'s default, they do, and only `exchange` is read.

    **Arguments:**

    - `expert_axes`: a name or several: each device has its share of the experts.
    - `token_axes`: the axes that tokens are split over. Those that are among `expert_axes`, too, exchange tokens for every call; over the
        others of `expert_axes` the devices share tokens, and add their results up.
    - `hidden_axes`: the axes that the hidden features of every expert are split over, as in tensor parallelism.
    - `mesh`: default: that of `jax.set_mesh`, or that of the layer's arrays outside of `jit`.
    - `exchange`: how tokens move. `"by_token"`: a token goes once to each device that has experts for it, and one weighted sum comes back from
        each. `"ragged"`, on GPUs and TPUs: it goes once for each expert; on GPUs this is slower than one device alone. `"auto"`: the second on
        TPUs, else the first.
    """

    expert_axes: str | Names = "expert"
    token_axes: str | Names = ("expert",)
    hidden_axes: str | Names = ()
    mesh: Any = None
    exchange: Literal["auto", "ragged", "by_token"] = "auto"

    def __post_init__(self):
        for name in ("expert_axes", "token_axes", "hidden_axes"):
            given = getattr(self, name)
            names = (given,) if isinstance(given, str) else given
            if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
                raise ValueError(
                    f"{name}: expected the name of a mesh axis or a tuple of names, received {given!r}; () for none."
                )
            object.__setattr__(self, name, names)
        if shared := set(self.hidden_axes) & {*self.expert_axes, *self.token_axes}:
            raise ValueError(
                f"hidden_axes: expected axes that split neither experts nor tokens, received {sorted(shared)[0]!r}; every device of such an axis "
                "has the same tokens."
            )
        if self.exchange not in ("auto", "ragged", "by_token"):
            raise ValueError(
                f"exchange: expected auto, ragged or by_token, received {self.exchange!r}; check the spelling."
            )


class _Split(NamedTuple):
    """Holds what a mesh splits over which of its axes."""

    mesh: Any
    experts: Names
    tokens: Names
    hidden: Names
    x: PartitionSpec
    exchange: str

    @property
    def exchanged(self) -> Names:
        """The axes over which tokens move."""
        return tuple(axis for axis in self.experts if axis in self.tokens)

    @property
    def added(self) -> Names:
        """The axes over which partial results are added."""
        return (*(axis for axis in self.experts if axis not in self.tokens), *self.hidden)

    @property
    def everywhere(self) -> Names:
        """All axes over which anything differs."""
        return tuple(dict.fromkeys((*self.tokens, *self.experts, *self.hidden)))

    def size(self, axes: Names) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


_WHOLE = _Split(None, (), (), (), PartitionSpec(), "auto")
"""Nothing is split."""


def over_devices(
    router: Any, experts: Any, x: Array, real: Array | None, parallel: ExpertParallel | None
) -> tuple[Array, RouterStatistics]:
    """The weighted sum of the experts of each token `[..., E]`, at least float32, and the statistics, on any mesh; `real [...]` says which
    tokens are none of padding."""
    if inside_manual_mesh():
        return _local(_WHOLE, (router, experts), x, real)
    exchange = "auto" if parallel is None else parallel.exchange
    mesh = explicit_mesh((router, experts, x))
    if mesh is not None:
        _check_arrays(experts)
        return _on_mesh(_by_types(mesh, experts, x, exchange), router, experts, x, real)
    mesh = None if parallel is None else _automatic_mesh(parallel, (experts, x))
    if parallel is None or mesh is None:
        return _local(_WHOLE, (router, experts), x, real)
    _check_arrays(experts)
    split = _by_names(mesh, parallel, experts, exchange)
    tokens = x.reshape(-1, x.shape[-1])
    spare = -tokens.shape[0] % split.size(split.tokens)
    kept = None if real is None else real.reshape(-1)
    if spare:
        kept = jnp.ones(tokens.shape[0], bool) if kept is None else kept
        kept, tokens = jnp.pad(kept, (0, spare)), jnp.pad(tokens, ((0, spare), (0, 0)))
    y, statistics = _on_mesh(split, router, experts, tokens, kept)
    return y[: y.shape[0] - spare].reshape(x.shape), statistics


def _check_arrays(experts: Any) -> None:
    if any(isinstance(w, Float8Weight) for w in (experts.gate_proj, experts.up_proj, experts.down_proj)):
        raise ValueError(
            "experts: expected arrays or quantised weights on a mesh, received weights of with_float8_training; leave experts out by "
            "where=lambda path: '.experts.' not in path and not path.endswith('.head.weight')."
        )


def _by_types(mesh: Any, experts: Any, x: Array, exchange: str) -> _Split:
    """By the shardings in the types of the arrays. A mesh axis that splits tokens and hidden features stays with the tokens: the weights
    are gathered, as for training with parameters split over the devices of the batch."""
    lead = spec_of(x)[:-1]
    tokens = tuple(axis for entry in lead for axis in mesh_axes(entry))
    up = experts.up_proj
    of_experts, of_hidden, _ = spec_of(up.codes if is_quantised(up) else up)
    hidden = tuple(axis for axis in mesh_axes(of_hidden) if axis not in tokens and mesh.shape[axis] > 1)
    return _Split(mesh, mesh_axes(of_experts), tokens, hidden, PartitionSpec(*lead, None), exchange)


def _by_names(mesh: Any, parallel: ExpertParallel, experts: Any, exchange: str) -> _Split:
    names = {name: getattr(parallel, name) for name in ("expert_axes", "token_axes", "hidden_axes")}
    for name, axes in names.items():
        if unknown := [axis for axis in axes if axis not in mesh.shape]:
            raise ValueError(
                f"{name}: expected axes of the mesh, which has {', '.join(mesh.shape)}, received {unknown[0]!r}; give the ExpertParallel of the "
                "layer these names."
            )
    x = PartitionSpec(parallel.token_axes or None, None)
    split = _Split(mesh, parallel.expert_axes, parallel.token_axes, parallel.hidden_axes, x, exchange)  # pyright: ignore[reportArgumentType]
    for what, size, axes in zip(
        ("num_experts", "hidden_dim"), experts.up_proj.shape, (split.experts, split.hidden)
    ):
        if size % split.size(axes):
            raise ValueError(
                f"{what}: expected a multiple of {split.size(axes)}, the devices of the axes {', '.join(axes)}, received {size}; each has as many."
            )
    return split


def _automatic_mesh(parallel: ExpertParallel, arrays: Any) -> Any:
    if parallel.mesh is not None:
        return parallel.mesh
    if (mesh := jax.sharding.get_abstract_mesh()).shape:
        return mesh
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None
        if not isinstance(leaf, Tracer) and isinstance(sharding, NamedSharding):
            return sharding.mesh
    return None


_HIDDEN = {"gate_proj": -2, "up_proj": -2, "down_proj": -1}
"""The axis of hidden features of each weight."""


def _with_whole_blocks(split: _Split, weight: Any, axis: int) -> Any:
    """The weight, as floats if devices would cut blocks of codes that share a scale."""
    if not is_quantised(weight):
        return weight
    least = 8 // weight.format.bits if axis == -1 else 1  # codes of a byte
    share = weight.shape[axis] // split.size(split.hidden)
    is_cut = split.hidden and share % max(weight.format.block[axis], least)
    return weight.astype(weight.dtype) if weight.transposed or is_cut else weight


@eqx.filter_jit
def _on_mesh(split: _Split, router: Any, experts: Any, x: Array, real: Array | None) -> Any:
    """Compiled: outside of `jit`, arrays on a mesh meet others in compiled functions alone."""
    hidden = {name: axis for name, axis in _HIDDEN.items() if getattr(experts, name) is not None}
    where = lambda e: tuple(getattr(e, name) for name in hidden)
    whole = [_with_whole_blocks(split, *each) for each in zip(where(experts), hidden.values())]
    experts = eqx.tree_at(where, experts, whole)
    arrays, static = eqx.partition((router, experts), eqx.is_array)
    one = lambda axes: axes or None
    columns = PartitionSpec(one(split.experts), one(split.hidden))
    specs = {
        "gate_proj": PartitionSpec(*columns, None),
        "up_proj": PartitionSpec(*columns, None),
        "down_proj": PartitionSpec(one(split.experts), None, one(split.hidden)),
        "gate_proj_bias": columns,
        "up_proj_bias": columns,
        "down_proj_bias": PartitionSpec(one(split.experts), None),
    }

    def spec_at(path: Any, leaf: Any) -> PartitionSpec:
        if not path[0].idx:
            return PartitionSpec()
        name = next((key.name for key in path if getattr(key, "name", "") in specs), None)
        if name is None:  # projections that every device has
            return PartitionSpec()
        if path[-1].name == name:
            return specs[name]
        # A part of a quantised weight: its codes, blocks, or factors; a single block of an axis is that of every device.
        return PartitionSpec(*(axis if size > 1 else None for axis, size in zip(specs[name], leaf.shape)))

    of_weights = jax.tree_util.tree_map_with_path(spec_at, arrays)
    of_rows = PartitionSpec(*split.x[:-1])
    given, placed = (arrays, x, real), (of_weights, split.x, None if real is None else of_rows)
    if split.mesh.explicit_axes:
        given = jax.tree.map(lambda leaf, spec: resharded(leaf, split.mesh, spec), given, placed)

    def body(given: Any) -> tuple[Array, RouterStatistics]:
        arrays, x, real = given
        return _local(split, eqx.combine(arrays, static), x, real)

    outs = (split.x, PartitionSpec())
    # JAX's simulation of a TPU compares numbers that vary over devices with ones that do not.
    checked = not has_simulated(experts)
    return jax.shard_map(body, mesh=split.mesh, in_specs=(placed,), out_specs=outs, check_vma=checked)(given)


def _local(split: _Split, layer: Any, x: Array, real: Array | None) -> tuple[Array, RouterStatistics]:
    """Returns what one device computes, with its own tokens and its share of the experts."""
    router, experts = layer
    routing = router(x)
    statistics = statistics_of(routing, router.choice.scoring, real)
    if split.tokens:
        statistics = jax.tree.map(lambda x: lax.psum(x, split.tokens), statistics)
    top_k = routing.indices.shape[-1]
    count, chosen = router.choice.num_experts, routing.indices
    if real is not None:
        # Padding is for no expert.
        chosen = jnp.where(real[..., None], chosen, jnp.int32(count))
    numbers = _numbers(split, chosen.reshape(-1), count)
    if split.hidden and experts.down_proj_bias is not None:
        first = lax.axis_index(split.hidden) == 0  # each bias is added once
        bias = jnp.where(first, experts.down_proj_bias, jnp.zeros_like(experts.down_proj_bias))
        experts = eqx.tree_at(lambda e: e.down_proj_bias, experts, bias)
    inputs, weights = experts.entering(router.for_experts(x)), routing.weights
    if router.choice.scale_inputs:
        inputs, weights = (inputs * weights).astype(x.dtype), jnp.ones_like(weights)
    inputs, weights = inputs.reshape(-1, inputs.shape[-1]), weights.reshape(-1, top_k)
    mine, devices = experts.up_proj.shape[0], split.size(split.exchanged)
    if devices > 1 and not _moves_ragged(split):
        y = _by_token(split, experts, inputs, numbers.reshape(-1, top_k), weights)
    else:
        order = order_of(numbers, devices * mine)
        rows = dispatched(inputs, top_k, order)
        if devices == 1:
            rows = experts(rows, order.sizes)
        else:
            rows = _by_row(split, experts, rows, numbers[order.order], order.sizes.reshape(devices, mine))
        y = combined(rows, weights, order)
    y = lax.psum(y, split.added) if split.added else y
    return experts.leaving(y.reshape(*x.shape[:-1], y.shape[-1]), x), statistics


def _numbers(split: _Split, experts: Array, count: int) -> Array:
    """The numbers of experts by the device that tokens are sent to, and then by their place on it; the largest one and one more for experts
    of devices that this one sends nothing to."""
    if not split.experts:
        return experts
    each = count // split.size(split.experts)
    part, number = experts // each, experts % each
    kept, target, left = experts < count, jnp.zeros_like(experts), split.size(split.experts)
    for axis in split.experts:
        left //= split.mesh.shape[axis]
        at = part // left % split.mesh.shape[axis]
        if axis in split.tokens:
            target = target * split.mesh.shape[axis] + at
        else:
            kept &= at == lax.axis_index(axis)
    return jnp.where(kept, target * each + number, split.size(split.exchanged) * each)


def _by_token(split: _Split, experts: Any, x: Array, numbers: Array, weights: Array) -> Array:
    """The weighted sums `[T, E]` of what the experts of all devices make of this device's tokens `x [T, E]`, whose experts have these
    `numbers [T, top_k]`."""
    axes, devices, mine = split.exchanged, split.size(split.exchanged), experts.up_proj.shape[0]
    tokens, top_k = numbers.shape
    x, weights = match_varying((x, weights), numbers)
    room, rows = room_of(tokens, top_k, devices), most_rows(tokens, top_k)
    me = lax.axis_index(axes)
    largest = lambda number: lax.pmax(match_varying_over(number, split.everywhere), split.everywhere)

    def sums(route: Any, experts: Any, x: Array, weights: Array) -> Array:
        given: list[Any] = [spread(axes, a, route) for a in (x, numbers + 1, weights)]
        x, there, weights = (a.reshape(-1, a.shape[-1]) for a in given)
        there = there - 1 - me * mine  # 0 was sent for none
        local = jnp.where((there >= 0) & (there < mine), there, mine)
        y = through_experts(experts, x, local, weights, rows, largest).astype(x.dtype)
        return collected(axes, y.reshape(devices, -1, y.shape[-1]), route)

    if room == tokens:
        return sums(None, experts, x, weights)
    route, most = routes_of(numbers // mine, devices, room)
    most = largest(most)
    once = lambda number, *given: sums(route(number), *given)
    is_needed = lambda number: most > number * room
    rounds = -(-tokens // room)
    return further_rounds(once(0, experts, x, weights), rounds, is_needed, once, experts, x, weights)


def _by_row(split: _Split, experts: Any, rows: Array, numbers: Array, sizes: Array) -> Array:
    """Returns what the experts of all devices make of this device's rows `[m, E]`, which are in the order of `numbers [m]`; `sizes [devices,
    experts]`."""
    exchange = Ragged(jnp.sum(sizes, axis=1), split.exchanged, rows.shape[0], split.everywhere)
    mine = sizes.shape[1]
    local = jnp.where(numbers < sizes.size, numbers % mine, mine)

    def once(number: Any, experts: Any, rows: Array) -> Array:
        given = exchange.there(rows, number)
        order = order_of(exchange.there(local, number, mine), mine)
        out = experts(given[order.order], order.sizes)
        return exchange.back(out[order.places], number)

    total = once(0, experts, rows)
    return further_rounds(total, exchange.rounds, exchange.is_needed, once, experts, rows)


def _moves_ragged(split: _Split) -> bool:
    if split.exchange != "auto":
        return split.exchange == "ragged"
    # With XLA's ragged collective for GPUs the layer took 4 to 36 times as long on two H200.
    devices = split.mesh.devices.flat if isinstance(split.mesh, jax.sharding.Mesh) else ()
    place = next((device.platform for device in devices), None)
    return place == "tpu" if place is not None else place_of_calls()[0] is Backend.TPU
