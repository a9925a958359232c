"""The compiled programs of `generate` and `stream`, and the calls that the host makes of them."""

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..dispatch import place_of_calls
from ..nn.arguments import check_key, is_known, read_sizes
from ..nn.projection import mesh_of
from . import speculative, steps
from .decoder import Decoder
from .prompts import capacity_of, check_positions, device_of, read_prompts, read_stop, rounded, widened
from .sampling import Sampling, SamplingArrays
from .speculative import check_speculation, Speculation
from .steps import Prompts, Rules, State

# The host starts this many calls before it waits for the first of them.
_AHEAD = 3


class Job(NamedTuple):
    """The inputs of every step of a call: the model and the rules of choice."""

    model: Decoder
    rules: Rules
    speculation: Speculation | None


class Call(NamedTuple):
    """The arguments of a call, after they were read and checked."""

    job: Job
    prompts: Prompts
    lead: tuple[int, ...]
    capacity: int
    most: int

    @property
    def is_known(self) -> bool:
        return all(is_known(x) for x in jax.tree.leaves((self.job, self.prompts)))


def read_call(
    model: Any,
    prompts: Any,
    max_new_tokens: Any,
    padding_mask: Any,
    sampling: Any,
    stop_tokens: Any,
    key: Any,
    speculate: Any = None,
) -> Call:
    """Checks the arguments that `generate` and `stream` share."""
    if not isinstance(model, Decoder):
        raise ValueError(
            f"model: expected an ejx.models.Decoder, received {type(model).__name__}; from_pretrained reads one."
        )
    (max_new_tokens,) = read_sizes(max_new_tokens=max_new_tokens)
    tokens, mask = read_prompts(prompts, padding_mask, model.config.vocab_size)
    check_positions(model.config.max_positions, mask, max_new_tokens)
    lead = tokens.shape[:-1]
    tokens, mask = widened(tokens.reshape(-1, tokens.shape[-1]), mask.reshape(-1, mask.shape[-1]))
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling: expected a Sampling, received {type(sampling).__name__}; Sampling(temperature=1.0) draws."
        )
    if key is not None and sampling.temperature == 0:
        raise ValueError(
            "key: expected None without sampling, received a key, though the likeliest token is always taken; pass "
            "sampling=Sampling(temperature=1.0) to draw."
        )
    rows = SamplingArrays.of([(sampling, 0)] * tokens.shape[0], tokens.shape[0])
    rows = rows._replace(seed=_seeds(sampling.seed, key, tokens.shape[0]))
    stop = model.config.stop_tokens if stop_tokens is None else stop_tokens
    stop = read_stop(stop, model.config.vocab_size)
    # One transfer of all of them.
    rows, stop, most = jax.device_put((rows, stop, np.int32(max_new_tokens)))
    rules = Rules(rows, stop, most, sampling.temperature > 0)
    check_speculation(speculate, model.config.vocab_size)
    if tokens.shape[0] == 0:
        speculate = None  # pools have rows
    drafts = 0 if speculate is None else speculate.num_draft_tokens
    capacity = capacity_of(tokens.shape[1] + rounded(max_new_tokens) + drafts, place_of_calls()[0])
    read = jax.device_put(Prompts(tokens, mask), device_of(prompts))
    return Call(Job(model, rules, speculate), read, lead, capacity, max_new_tokens)


def _seeds(seed: int, key: Array | None, count: int) -> Any:
    if key is not None:
        check_key(key)
        return jax.random.bits(key, (count,), jnp.uint32)
    return np.uint32(seed) + np.arange(count, dtype=np.uint32)


# The programs. The host reads a report of each call, int32 `[T + 2, N]`. Its first T rows are new tokens. The next row is the number of new tokens so
# far. The last row is a sum of flags: 1 if the sequence has ended, 2 if its logits were finite.


def _report(state: State, tokens: Array) -> Array:
    flags = state.done.astype(jnp.int32) + 2 * state.finite.astype(jnp.int32)
    return jnp.concatenate([tokens.T, state.count[None], flags[None]])


def _begin(job: Job, prompts: Prompts, capacity: int, dtype: Any) -> tuple[State, Array]:
    if job.speculation is None:
        state, tokens = steps.begin(job.model, job.rules, prompts, capacity, dtype)
    else:
        state, tokens = speculative.begin(job.model, job.rules, job.speculation, prompts, capacity, dtype)
    return state, _report(state, tokens)


def _step(job: Job, state: State) -> tuple[State, Array]:
    if job.speculation is None:
        return steps.step(job.model, job.rules, state)
    return speculative.step(job.model, job.rules, job.speculation, state)


def _go_on(job: Job, state: State, turns: Array) -> tuple[State, Array]:
    """Takes steps until all rows have ended, at most `turns`."""

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, _step(job, carry[1])[0]

    goes_on = lambda carry: (carry[0] < turns) & ~jnp.all(carry[1].done)
    _, state = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))
    return state, _report(state, jnp.zeros((state.done.shape[0], 0), jnp.int32))


_begun = eqx.filter_jit(_begin)


@eqx.filter_jit(donate="all-except-first")
def _continued(job_and_turns: tuple[Job, Array], state: State) -> tuple[State, Array]:
    job, turns = job_and_turns
    return _go_on(job, state, turns)


@eqx.filter_jit
def _whole(job: Job, prompts: Prompts, capacity: int, dtype: Any) -> tuple[Array, Array, Array]:
    """The prompt and all steps as one program, for calls inside `jit` and on meshes."""
    arrays, static = eqx.partition((job, prompts), eqx.is_array)

    def run(arrays: Any) -> tuple[Array, Array, Array]:
        job, prompts = eqx.combine(arrays, static)
        state, _ = _begin(job, prompts, capacity, dtype)
        state, _ = _go_on(job, state, job.rules.most)
        return state.written, state.count, state.finite

    if (mesh := mesh_of(arrays)) is None:
        return run(arrays)
    # The compiler chooses the shardings in the loop, since the type of an empty cache does not determine that of a filled one.
    whole = NamedSharding(mesh, PartitionSpec())
    on_mesh: Any = jax.sharding.auto_axes(run, out_sharding=(whole, whole, whole))
    return on_mesh(arrays)


class _Static:
    """The static part of a tree, on which a program depends besides the arrays. It is hashed once, since the host calls a program for every token."""

    def __init__(self, tree: Any):
        leaves, self.tree = jax.tree.flatten(tree)
        self.rest = tuple(None if eqx.is_array(x) else (type(x), x) for x in leaves)
        self._hash = hash((self.tree, self.rest))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Static) and (self.rest, self.tree) == (other.rest, other.tree)
        )

    def whole(self, arrays: tuple[Array, ...]) -> Any:
        """The tree with these arrays and the static part."""
        rest = iter(arrays)
        leaves = [next(rest) if x is None else x[1] for x in self.rest]
        return jax.tree.unflatten(self.tree, leaves)


def _arrays(tree: Any) -> tuple[Array, ...]:
    return tuple(x for x in jax.tree.leaves(tree) if eqx.is_array(x))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _advance(
    job_of: _Static, state_of: _Static, count: int, weights: tuple[Array, ...], arrays: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    """Takes `count` steps, unrolled. Arrays go in and out as flat tuples: flattening the tree of a model would take most of the host's time."""
    job, state, new = job_of.whole(weights), state_of.whole(arrays), []
    for _ in range(count):
        state, tokens = _step(job, state)
        new.append(tokens)
    return _arrays(state), _report(state, jnp.concatenate(new, axis=1))


# Their calls.


def run(
    call: Call, dtype: Any, progress: Callable[[int], Any] | None, turns: int
) -> tuple[Array, Array, Array]:
    """Returns the new tokens `[N, S]`, padded with -1; their numbers `[N]`; and whether all logits were finite, `[N]`.

    `progress` is called with the number of tokens so far, after every `turns` steps.
    """
    mesh = mesh_of((call.job, call.prompts))
    if progress is None and (not call.is_known or mesh is not None):
        return _whole(call.job, call.prompts, call.capacity, dtype)
    if progress is None:
        state, _ = _begun(call.job, call.prompts, call.capacity, dtype)
        state, _ = _continued((call.job, call.job.rules.most), state)
        return state.written, state.count, state.finite
    placed = None if mesh is None else NamedSharding(_explicit_mesh(call), PartitionSpec())
    call, context = _on_automatic_mesh(call)
    with context():
        advance = functools.partial(_continued, (call.job, jnp.int32(turns)))
        state, report = _begun(call.job, call.prompts, call.capacity, dtype)
    ahead = _Ahead(advance, state, report, context)
    for new in ahead.reports(-(-(call.most - 1) // turns)):
        progress(int(new[-2].max(initial=0)))
    state = ahead.state
    results = state.written, state.count, state.finite
    return results if placed is None else jax.device_put(results, placed)


def step_by_step(call: Call, dtype: Any, steps_per_call: int) -> Iterator[np.ndarray]:
    """Yields the report of each call. The first has one token of each row, later ones have `steps_per_call`."""
    call, context = _on_automatic_mesh(call)
    with context():
        state, report = _begun(call.job, call.prompts, call.capacity, dtype)
    job_of, state_of, weights = _Static(call.job), _Static(state), _arrays(call.job)
    advance = lambda arrays: _advance(job_of, state_of, steps_per_call, weights, arrays)
    ahead = _Ahead(advance, _arrays(state), report, context)
    yield from ahead.reports(-(-(call.most - 1) // steps_per_call))


@dataclasses.dataclass
class _Ahead:
    """Calls of a program that the host starts ahead: it reads the report of one while the device runs the next ones."""

    advance: Callable[[Any], tuple[Any, Array]]
    state: Any
    report: Array
    context: Callable[[], Any]

    def reports(self, calls: int) -> Iterator[np.ndarray]:
        """Yields the first report and those of up to `calls` calls, in order, until all rows have ended."""
        reports = collections.deque([self.report])
        while reports:
            while calls and len(reports) < _AHEAD:
                with self.context():
                    self.state, report = self.advance(self.state)
                report.copy_to_host_async()
                reports.append(report)
                calls -= 1
            new = np.asarray(reports.popleft())
            yield new
            if np.all(new[-1] & 1):
                return


def _on_automatic_mesh(call: Call) -> tuple[Call, Any]:
    """The call with its arrays on an automatic mesh instead of an explicit one, and the context for its programs. So the compiler also chooses the
    shardings of the state between programs."""
    if mesh_of((call.job, call.prompts)) is None:
        return call, contextlib.nullcontext
    mesh = _explicit_mesh(call)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)

    def moved(x: Any) -> Any:
        if mesh_of(x) is None:
            return x
        return jax.device_put(x, NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind))

    return jax.tree.map(moved, call), functools.partial(jax.set_mesh, mesh)


def _explicit_mesh(tree: Any) -> Mesh:
    """The explicit mesh of the arrays, if they are known and on one."""
    return next(x.sharding.mesh for x in jax.tree.leaves(tree) if mesh_of(x) is not None)


def warn_of_rows(name: str, finite: np.ndarray, callers: int) -> None:
    """Warns, in the name of the function `name`, of rows whose logits are not finite. The user's line is `callers` frames above."""
    if not np.all(finite):
        warnings.warn(
            f"{name}: the logits of rows {np.flatnonzero(~finite.astype(bool)).tolist()} are not finite, so these rows ended early; look for "
            "NaN in the weights.",
            RuntimeWarning,
            stacklevel=callers + 1,
        )
