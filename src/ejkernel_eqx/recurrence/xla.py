"""The linear-time core in plain XLA: chunks of tokens, matrix products inside them, one scan over the states between them.

Work inside the chunks is done for all of them at once and recomputed in the backward, so that only operands and the states at the
starts of chunks stay in memory. `xla_chunks` has the layout, `xla_decay` the decays within a chunk, `xla_solve` the systems of the delta rule.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._shapes import is_symbolic
from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..launch.fields import Checked, Power
from ..parallel import match_varying
from ..sequences.tokens import from_slots, over, to_slots
from .before import moved, moved_back
from .heads import repeat_heads
from .spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays, VALUE
from .xla_chunks import Chunks, front, merge, split
from .xla_decay import channel_decays, closed, decayed_mix, decayed_scores, scalar_decays
from .xla_solve import INVERSE, solve
from .xla_states import advance, over_chunks, over_writes, times, Writes

_CHUNKS = (64, 32, 128, 16)


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """Tokens per chunk, a power of two; short sequences use a smaller one."""

    chunk_size: Power


config_type = XlaConfig
unsupported = supports_all
_INVERSES = jax.checkpoint_policies.save_only_these_names(INVERSE)


def default_config(problem: Any, device: Any) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first. Chunk sizes longer than the sequence count as one."""
    longest = _power_of_two(problem.dim("T"))
    return [XlaConfig(size) for size in dict.fromkeys(min(size, longest) for size in _CHUNKS)]


def _power_of_two(length: Any) -> int:
    """The smallest chunk size that holds this many tokens; the largest if the length is symbolic."""
    if is_symbolic(length):
        return max(_CHUNKS)
    return 1 << max(length - 1, 0).bit_length()


def apply(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`out [*, T, R, V]` in v's dtype and the final state in the spec's. Leading axes are not merged, as they may be sharded."""
    lead = arrays.q.ndim - 3
    call = lambda arrays: _apply(arrays, spec, config)
    if lead == 0:
        out, state = call(jax.tree.map(lambda x: x[None], arrays))
        return out[0], state[0]
    return over(lead - 1, call)(arrays)


def _apply(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`apply` for one leading axis."""
    call = _Call(arrays, spec, config)
    if arrays.q.shape[1] == 0 or call.chunks.sequences == 0:
        out, state = call.nothing()
    elif spec.before:
        out, state = _apply(moved(arrays), dataclasses.replace(spec, before=False), config)
        out = moved_back(arrays, spec, out.astype(call.wide))
    else:
        mixes = spec.delta or arrays.a is not None
        out, state = call.by_token() if mixes and spec.decay == VALUE else call.by_chunk()
    if arrays.skip is not None:
        # Added before the cast, so that the output is rounded once.
        out = out + arrays.skip.astype(call.wide)[:, None] * arrays.v.astype(call.wide)
    return out.astype(arrays.v.dtype), state.astype(spec.state_dtype)


def _to_next(x: Array, first: int) -> Array:
    """`x [B, M, C, X]`, of each token for the next one, and `first` for the first."""
    return jnp.pad(x[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=first)


def _joined(scores: tuple[Array, ...]) -> Array:
    return scores[0] if len(scores) == 1 else jnp.concatenate(scores, -1)


class _Local:
    """Computations inside the chunks, for all chunks at once: products of keys, queries and values `[B, M, C, ...]` with their decays.

    A factor of 1 is `None`. Entries hidden by segments are 0.
    """

    def __init__(self, call: "_Call", g: Array | None):
        self.kind, self.chunks, self.precision = call.spec.decay, call.chunks, call.precision
        self.decays: Any = None
        self.head = self.head_before = self.tail = self.total = None
        if g is not None:
            self.decays = channel_decays(g) if self.kind in (KEY, VALUE) else scalar_decays(g)
            self.head, self.tail = self.decays.head, self.decays.tail
            if call.arrays.a is not None:
                self.head_before = _to_next(self.head, 1)
            # The factor lies along values for a decay of values, else along keys, of states `[.., D, V]`.
            self.total = jnp.expand_dims(self.decays.total, -2 if self.kind == VALUE else -1)
        if self.chunks.starts is not None:
            cut = self.chunks.cut
            keep = lambda seen, x: jnp.where(seen, jnp.ones((), call.wide) if x is None else x, 0)
            enters = cut(self.chunks.enters())[..., None]
            self.head, self.head_before = keep(enters, self.head), keep(enters, self.head_before)
            self.tail = keep(cut(self.chunks.leaves())[..., None], self.tail)
            self.total = keep(self.chunks.passes()[..., None, None], self.total)

    def dot(self, pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=self.precision)

    def scores(self, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
        """`[B, M, C, C]` for each of `xs` and, with it, each of `ys`: `x_i . y_j` decayed from `j` to `i`, zero where `i` does not see `j`."""
        return tuple(map(self._seen, self._decayed(xs, ys)))

    def scores_before(
        self, x: Array, ys: tuple[Array, ...], others: tuple[Array, ...] = ()
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """`scores` for readers of the state before their token: `x_i . y_j` decayed from `j` to `i - 1`, zero for `j = i` too. And, with the same
        decays, those of `others`."""
        # A token's reader stands at the token before, so that no decay is divided out.
        early = jnp.pad(x[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
        every = self._decayed((early, *others), ys)
        before = [jnp.tril(_to_next(scores, 0), -1) for scores in every[: len(ys)]]
        return tuple(map(self._seen, before)), tuple(map(self._seen, every[len(ys) :]))

    def _decayed(self, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
        """`scores` across segments; those without a channel's decay may be anything where j > i."""
        if self.kind == KEY:
            return decayed_scores(xs, ys, self.decays, self.precision)
        pairs = None if self.decays is None else self.decays.pairs
        return tuple(times(self._products(x, y), pairs) for x in xs for y in ys)

    def mixed(self, q: Array, keys: tuple[Array, ...]) -> Array:
        """`[B, M, C, K * C]`: the weights, for each query, of the values of each of `K` keys, without decays of values."""
        # Decays of values differ by channel, so they enter in `mix` and not in the scores.
        if self.kind == VALUE:
            (k,) = keys
            return self._seen(self._products(q, k))
        return _joined(self.scores((q,), keys))

    def mix(self, scores: Array, v: Array) -> Array:
        """`[B, M, C, V]`: the values of visible tokens, weighted by these scores."""
        if self.kind == VALUE:
            return decayed_mix(scores, v, self.decays, self.precision)
        return self.dot("...rs,...sv->...rv", scores, v)

    def _products(self, x: Array, y: Array) -> Array:
        return self.dot("...rd,...sd->...rs", x, y)

    def _seen(self, scores: Array) -> Array:
        return jnp.where(self.chunks.visible(), scores, 0)

    def read(self, q: Array, states: Array) -> Array:
        """`[B, M, C, V]`: what queries read from the states `[B, M, D, V]` at the starts of their chunks."""
        if self.kind == KEY:
            # A decay of key channels scales the queries before those channels are summed.
            return self.dot("...rd,...dv->...rv", times(q, self.head), states)
        return times(self.dot("...rd,...dv->...rv", q, states), self.head)

    def write(self, k: Array, v: Array) -> Array:
        """`[B, M, D, V]`: what keys and values add to the states at the ends of their chunks."""
        if self.kind == KEY:
            k = times(k, self.tail)
        else:
            v = times(v, self.tail)
        return self.dot("...sd,...sv->...dv", k, v)


class _Call:
    """One call during its trace."""

    def __init__(self, arrays: RecurrenceArrays, spec: RecurrenceSpec, config: XlaConfig):
        self.arrays, self.spec = arrays, spec
        self.wide = accumulator(arrays.q.dtype)
        # Float32 means float32 everywhere; for 16-bit operands the device may use its faster products.
        self.precision = lax.Precision.HIGHEST if arrays.q.dtype.itemsize >= 4 else None
        self.chunks = Chunks(arrays, spec, min(config.chunk_size, _power_of_two(arrays.q.shape[1])))
        self.heads = heads_of(arrays, spec)

    def nothing(self) -> tuple[Array, Array]:
        """The results for zero tokens or zero sequences."""
        batch, length, _, dim = self.arrays.q.shape
        values, state = self.arrays.v.shape[-1], self.arrays.initial_state
        out = jnp.zeros((batch, length, self.heads.out, values), self.wide)
        if state is None:
            count = () if self.chunks.sequences is None else (self.chunks.sequences,)
            state = jnp.zeros((batch, *count, self.heads.state, dim, values), self.wide)
        return match_varying((out, state), self.arrays)

    def operands(self) -> tuple[Array, Any, Array, Array | None, Array | None, Any]:
        """q, k, v, g, beta, and a and b, `[B, M, C, ...]`, except q `[B, R, P, D]`; a constant decay has become one per token."""
        arrays, g = self.arrays, self.arrays.g
        if g is not None and self.spec.decay == CONSTANT:  # positions without a token do not decay
            g = jnp.broadcast_to(g[:, None], (*arrays.q.shape[:2], g.shape[-1]))
        take = lambda x: self.chunks.cut(self.chunks.take(x.astype(self.wide)))
        q = self.chunks.take(arrays.q.astype(self.wide)) * self.spec.scale
        beta = None if arrays.beta is None else take(arrays.beta[..., None])
        ab = None if arrays.a is None else (take(arrays.a), take(arrays.b))
        return q, take(arrays.k), take(arrays.v), None if g is None else closed(take(g)), beta, ab

    def by_chunk(self) -> tuple[Array, Array]:
        """All chunks at once, except for the scan over their states."""
        q, k, v, g, beta, ab = self.operands()
        zeros, keys = self._zeros(k, v), (k,)
        # With one query head per state head, keys and queries share the work on their decays.
        shared = self.chunks.cut(q) if self.heads.out == self.heads.state else None
        if self.spec.delta:
            reads = jax.checkpoint(self._delta_reads)(shared, k, g)
            xs = jax.checkpoint(self._delta_writes, policy=_INVERSES)(reads[0], k, v, g, beta)
            states, written, final = self._over_writes(xs, zeros)
            # The written values include beta already.
            values, beta = written, None
        elif ab is not None:
            reads = jax.checkpoint(self._rank_one_reads)(shared, ab, k, g)
            xs = jax.checkpoint(self._rank_one_writes, policy=_INVERSES)(reads[0], ab, k, v, g, beta)
            states, written, final = self._over_writes(xs, zeros)
            # Each token writes two values, its own at `k` and what `a` reads at `b`.
            assert written is not None
            keys, values, beta = (k, ab[1]), jnp.concatenate([times(v, beta), written], 2), None
        else:
            reads = (None, None)
            xs = jax.checkpoint(self._linear_writes)(k, v, g, beta)
            states, _, final = self._over_writes(xs, zeros)
            values = v
        scores, read = jax.checkpoint(self._scores), jax.checkpoint(self._read)

        def over_queries(q: Array) -> Array:
            known = scores(q, keys, g) if reads[1] is None else reads[1]
            return read(q, known, values, g, beta, states)

        return self.chunks.give(self._over_groups(over_queries, q)), final

    def _over_groups(self, function: Callable[[Array], Array], q: Array) -> Array:
        """`function` of queries `[B, HS, P, D]`, for each of the `R / HS` query heads of a state head."""
        if self.heads.out == self.heads.state:
            return function(q)
        # One group after another, so that only one has its scores in memory.
        out = lax.map(function, jnp.moveaxis(split(q, 1, self.heads.state), 2, 0))
        return merge(jnp.moveaxis(out, 0, 2), 1)

    def _linear_writes(self, k: Array, v: Array, g: Array | None, beta: Array | None) -> Any:
        """Computes what each chunk adds to the state, and the factor of the incoming state."""
        local = _Local(self, g)
        return Writes(local.write(k, times(v, beta)), kept=local.total)

    def _delta_reads(self, q: Array | None, k: Array, g: Array | None) -> tuple[Array, Array | None]:
        """The scores of each key with the keys before it and, with the same decays, those of the queries, if given."""
        keys, *queries = _Local(self, g).scores((k, *(() if q is None else (q,))), (k,))
        # Strictly below the diagonal, as a key meets only the keys before it.
        return jnp.tril(keys, -1), queries[0] if queries else None

    def _delta_writes(self, reads: Array, k: Array, v: Array, g: Array | None, beta: Array | None) -> Any:
        """Each chunk writes the values `own - gained @ state` at the keys `put`, and scales the state by a factor.

        With `a` the scores of each key with the keys before it, `own = (I + beta a)^-1 beta v`, and `gained` is the same for the keys,
        decayed from the start of the chunk.
        """
        local = _Local(self, g)
        known = times(v, beta), times(times(k, local.head), beta)
        own, gained = solve(times(reads, beta), known)
        return Writes(None, own, gained, times(k, local.tail), local.total)

    def _rank_one_reads(
        self, q: Array | None, ab: Any, k: Array, g: Array | None
    ) -> tuple[Any, Array | None]:
        """The scores of each `a` with the keys `k` and `b` before it and, with the same decays, those of the queries, if given."""
        before, own = _Local(self, g).scores_before(ab[0], (k, ab[1]), () if q is None else (q,))
        return before, _joined(own) if own else None

    def _rank_one_writes(
        self, reads: Any, ab: Any, k: Array, v: Array, g: Array | None, beta: Array | None
    ) -> Any:
        """Each chunk writes the values `own - gained @ state`, which `a` reads, at the keys `b`, and adds its values at the keys `k`.

        With `A` and `L` the scores of each `a` with the `b` and the `k` before it, `own = (I - A)^-1 L v`, and `-gained` is the same for the
        vectors `a`, decayed from the start of the chunk to the token before.
        """
        local, (a, b), (of_keys, among), v = _Local(self, g), ab, reads, times(v, beta)
        known = local.dot("...rs,...sv->...rv", of_keys, v), -times(a, local.head_before)
        own, gained = solve(-among, known)
        return Writes(local.write(k, v), own, gained, times(b, local.tail), local.total)

    def _scores(self, q: Array, keys: tuple[Array, ...], g: Array | None) -> Array:
        return _Local(self, g).mixed(self.chunks.cut(q), keys)

    def _read(
        self,
        q: Array,
        scores: Array,
        values: Array,
        g: Array | None,
        beta: Array | None,
        states: Array | None,
    ) -> Array:
        """The outputs of all chunks, from the states at their starts and the values written inside them."""
        local, q = _Local(self, g), self.chunks.cut(q)
        out = local.mix(scores, times(values, beta))
        return self.chunks.join(out if states is None else local.read(q, states) + out)

    def by_token(self) -> tuple[Array, Array]:
        """Token by token: with a decay per value channel, what is read before it is written has no triangular system that its values share."""
        q, k, v, g, beta, ab = self.operands()
        # The queries of a state head side by side, [B, HS, P, R / HS * D].
        q = self.chunks.cut(merge(jnp.moveaxis(split(q, 1, self.heads.state), 2, 3), 3))
        begins = None if self.chunks.starts is None else self.chunks.cut(self.chunks.begins())[..., None]

        def token(state: Array, x: Any) -> tuple[Array, Array]:
            q, k, v, g, beta, ab, begins = x
            if begins is not None:
                state = jnp.where(begins[..., None], 0, state)
            before, state = state, state * jnp.exp(g)[..., None, :]
            if ab is not None:
                read = (before * ab[0][..., None]).sum(-2)
                state = state + ab[1][..., None] * read[..., None, :]
            error = times(v - (state * k[..., None]).sum(-2) if self.spec.delta else v, beta)
            state = state + k[..., None] * error[..., None, :]
            q = split(q, 2, q.shape[-1] // k.shape[-1])
            return state, jnp.einsum("...gd,...dv->...gv", q, state, precision=self.precision)

        zeros = self._zeros(k, v)

        @jax.checkpoint
        def chunk(state: Array | None, x: Any) -> tuple[Array, Array]:
            return lax.scan(token, zeros if state is None else state, x)

        tokens_first = lambda x: jnp.moveaxis(front(x, self.heads.state), 3, 1)  # [NC, C, B, HS, ...]
        xs = jax.tree.map(tokens_first, (q, k, v, g, beta, ab, begins))

        def alone() -> tuple[Array, Array]:
            state, out = chunk(None, jax.tree.map(lambda x: x[0], xs))
            return state, out[None]

        # The outputs are [NC, C, B, HS, R / HS, V].
        _, out, final = self._scan(alone, functools.partial(over_chunks, chunk, xs), zeros)
        return self.chunks.give(merge(jnp.moveaxis(merge(out, 0), 0, 3), 1)), final

    def _zeros(self, k: Array, v: Array) -> Array:
        """A zero state `[B, HS, D, V]` with the sharding and varying axes of what will be added to it."""
        first = lambda x: jnp.zeros_like(front(x, self.heads.state)[0, :, :, 0])
        zeros = match_varying((first(k), first(v)), self.arrays)
        return zeros[0][..., None] + zeros[1][..., None, :]

    def _over_writes(self, xs: Writes, zeros: Array) -> tuple[Array | None, Array | None, Array]:
        alone = functools.partial(advance, self.precision, None, xs)
        return self._scan(alone, functools.partial(over_writes, self.precision, xs), zeros)

    def _scan(
        self,
        alone: Callable[[], tuple[Array, Any]],
        scan: Callable[..., tuple[Array, Any, Array]],
        zeros: Array,
    ) -> tuple[Array | None, Any, Array]:
        """States at the starts of chunks, what else `scan(first, fresh, entering)` returns, and the final states `[B, HS, D, V]` or
        `[B, N, HS, D, V]`. A single chunk without an initial state is `alone`, without zeros before it, since JAX 0.10 multiplies by such
        constant zeros wrongly on a CPU.
        """
        chunks, initial = self.chunks, self.arrays.initial_state
        if chunks.count == 1 and initial is None:
            new, others = alone()
            return None, others, chunks.final_states(new[None], None) if chunks.packed else new
        if initial is not None:
            initial = initial.astype(self.wide)
        if not chunks.packed:
            # The sum gives the initial state the sharding of the zeros, which the scan's carry must keep.
            return scan(zeros if initial is None else zeros + initial, None, None)
        fresh = chunks.fresh.T[..., None, None, None]
        entering = None if initial is None else chunks.states_of_chunks(initial)
        states, others, after = scan(zeros, fresh, entering)
        return states, others, chunks.final_states(after, initial)


def step(arrays: StepArrays, spec: RecurrenceSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`out [*, B, R, V]` in v's dtype and the new states (the whole pool); each state is read once and written once."""
    wide = accumulator(arrays.q.dtype)
    pool, indices = arrays.state, arrays.indices
    lead = pool.ndim - 4
    state = from_slots(pool, indices, lead)
    # The state's key and value axes, in either layout.
    key = (lambda x: x[..., None, :]) if spec.transposed else (lambda x: x[..., :, None])
    value = (lambda x: x[..., :, None]) if spec.transposed else (lambda x: x[..., None, :])
    keys = -1 if spec.transposed else -2
    heads = pool.shape[lead + 1]
    spread = lambda x, axis: repeat_heads(x.astype(wide), axis, heads)
    state = state.astype(wide)
    k, v = spread(arrays.k, -2), spread(arrays.v, -2)
    before = state
    read = None if arrays.a is None else (state * key(spread(arrays.a, -2))).sum(keys)
    if arrays.g is not None:
        g = jnp.exp(spread(arrays.g, -1 if spec.decay == SCALAR else -2))
        over_channels = {SCALAR: lambda g: g[..., None, None], KEY: key, VALUE: value}[spec.decay]
        state = state * over_channels(g)
    # The delta rule reads the state after its decay.
    written = v - (state * key(k)).sum(keys) if spec.delta else v
    if arrays.beta is not None:
        written = written * spread(arrays.beta, -1)[..., None]
    state = state + key(k) * value(written)
    if read is not None:
        state = state + key(spread(arrays.b, -2)) * value(read)
    q = arrays.q.astype(wide) * spec.scale
    shared = max(q.shape[-2] // heads, 1)  # query heads per state head
    q = repeat_heads(q, -2, heads * shared)
    q = q.reshape(*q.shape[:-2], heads, shared, q.shape[-1])
    seen = before if spec.before else state
    out = (seen[..., None, :, :] * key(q)).sum(keys).reshape(*q.shape[:-3], heads * shared, v.shape[-1])
    if arrays.skip is not None:
        out = out + jnp.expand_dims(arrays.skip.astype(wide), lead) * v
    return to_slots(out.astype(arrays.v.dtype), state.astype(pool.dtype), pool, indices, lead)
