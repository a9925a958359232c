"""`RecurrentLayer`: the base class of layers in linear time."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, get_args, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int
from ..convolution import CausalConv1d
from ..core.arguments import accumulator
from ..paged import RaggedBatch
from ..sequences.packing import read_count
from .arguments import check_slots, read_array, read_batch_shape, read_dtype, read_packed, read_tokens
from .drafts import empty_drafts, new_tokens
from .projection import compute_dtype_of, leading_axes_of, stored_dtype_of
from .published import Published
from .recurrent_state import RecurrentState as RecurrentState
from .recurrent_state import Rows as Rows
from .short_convolution import ShortConvolution
from .signatures import SameOutput, TokenInputs, Tokens
from .tokens import check_ragged, clear, ids_of, packed


class RecurrentLayer(Published):
    """Base class of layers that mix tokens in linear time and decode from a state of constant size.

    Parameters have the names and shapes of the published model code; the guide "Recurrent layers" lists the constructor calls and the
    names. All layers share these arguments:

    - `embed_dim`: features `E` of the input and the output.
    - `norm_eps`: added to the mean square, in layers with a norm.
    - `state_dtype`, `platform`, `config`: as in the underlying operation; the platform also applies to the short convolutions and the norm.
    - `sequence_axis`: a mesh axis that the tokens are split over, as in the underlying operation; for the short convolutions too. States are whole
        on every device.
    - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode). Decay parameters (`A_log`, `D`, and `dt_bias` if it is
        a separate parameter) are at least float32.
    - `compute_dtype`: dtype of the computation and the output; inputs and projection weights are cast to it. Default: the promoted dtype
        of the two.
    - `key`: PRNG key for the initial weights.
    """

    recurrence: eqx.AbstractVar[Any]
    """The operation, from `ejkernel_eqx.recurrence` or `ejkernel_eqx.selective_scan`."""

    embed_dim: eqx.AbstractVar[int]

    compute_dtype: eqx.AbstractVar[str | None]

    @abc.abstractmethod
    def _mix(self, x: Array, rows: Rows) -> Any:
        """The computation of the layer, on tokens with zeros at padding positions; the output, or several in a tuple."""

    @abc.abstractmethod
    def _kept(self) -> tuple[Sequence[ShortConvolution], tuple[Any, ...]]:
        """The short convolutions, and the shape of the state of the recurrence, without leading axes; of a tuple of states those of all."""

    def _projections(self) -> tuple[Any, ...]:
        """The values of the fields declared as projections: the projections of the layer, or what stands in their places."""
        fields = dataclasses.fields(self)
        return tuple([getattr(self, f.name) for f in fields if eqx.nn.Linear in (f.type, *get_args(f.type))])

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, self._projections())

    def _state_shapes(self, batch: tuple[int, ...]) -> list[tuple[int, ...]]:
        convolutions, recurrent = self._kept()
        recurrent = (recurrent,) if all(isinstance(n, int) for n in recurrent) else recurrent
        shapes = [*((layer.width - 1, layer.channels) for layer in convolutions), *recurrent]
        return [(*batch, *shape) for shape in shapes]

    def init_state(
        self,
        batch_shape: tuple[int, ...] | int,
        dtype: DTypeLike | None = None,
        *,
        num_draft_tokens: int = 0,
    ) -> RecurrentState:
        """Returns the state before the first token: zeros.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `dtype`: of the states of the convolutions; default `compute_dtype`, or else the dtype of the weights. The recurrent state is
            float32 (float64 for float64), or the `state_dtype` passed at construction.
        - `num_draft_tokens`: for a pool of slots: the maximum number of new tokens per sequence that `accept` of the state can roll back. At least
            the number of tokens that one call verifies, including the certain one before the drafts.
        """
        batch = read_batch_shape(batch_shape)
        shapes, convolutions = self._state_shapes(batch), len(self._kept()[0])
        stored = self._stored_dtype()
        dtype = stored if dtype is None else read_dtype("dtype", dtype)
        # A short convolution in the place of the recurrence keeps inputs, as others do.
        is_short = isinstance(self.recurrence, CausalConv1d)
        wide = dtype if is_short else self.recurrence.state_dtype or accumulator(stored)
        # Beside its matrix, a state in two parts has numbers that are not rounded.
        dtypes = wide, *(accumulator(stored) for _ in shapes[convolutions + 1 :])
        parts = [jnp.zeros(shape, own) for shape, own in zip(shapes[convolutions:], dtypes, strict=True)]
        state = RecurrentState(
            conv=tuple(jnp.zeros(shape, dtype) for shape in shapes[:convolutions]),
            recurrent=tuple(parts) if len(parts) > 1 else parts[0],
        )
        count = read_count("num_draft_tokens", num_draft_tokens)
        if not count:
            return state
        return dataclasses.replace(state, drafts=empty_drafts(self._parts(dtype), batch, count))

    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int,
        max_length: int | None = None,
        dtype: DTypeLike | None = None,
    ) -> RecurrentState:
        """Returns `init_state(batch_shape, dtype)`, by the name that attention layers have, so that a model can treat both alike.
        `max_length` is not used: a state holds any number of tokens."""
        return self.init_state(batch_shape, dtype)

    def init_pool(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        batch_shape: tuple[int, ...] | int = (),
        dtype: Any = None,
        scales: str | None = None,
        num_draft_tokens: int = 0,
    ) -> RecurrentState:
        """Returns a pool of states, `init_state((*batch_shape, num_slots), num_draft_tokens=num_draft_tokens)`. Attention and recurrent layers
        share this method and its arguments, so that a server can treat them alike. `num_pages`, `page_size`, `dtype` and `scales` are for
        attention layers and not used here."""
        slots = read_count("num_slots", num_slots, least=1)
        return self.init_state((*read_batch_shape(batch_shape), slots), num_draft_tokens=num_draft_tokens)

    def _parts(self, dtype: Any) -> list[dict[str, Any]]:
        """The shapes of the inputs of each part for one token; those of convolutions in `dtype`."""

        def given(layer: Any) -> list[dict[str, Array]]:
            lead = leading_axes_of(layer._projections())
            arrays, rest = eqx.partition(layer, eqx.is_array)
            one = eqx.combine(jax.tree.map(lambda x: x[(0,) * lead], arrays), rest)
            rows = Rows(0)
            one._mix(jnp.zeros((1, self.embed_dim), self._stored_dtype()), rows)
            return rows.given

        *conv, recurrent = eqx.filter_eval_shape(given, self)
        cast = lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
        return [*jax.tree.map(cast, conv), recurrent]

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tokens, state: None = None, **tokens: Unpack[TokenInputs]) -> SameOutput: ...

        @overload
        def __call__(
            self, x: Tokens, state: RecurrentState, **tokens: Unpack[TokenInputs]
        ) -> tuple[SameOutput, RecurrentState]: ...

        @overload
        def __call__(
            self, x: Float[AnyArray, "T E"], state: RecurrentState, *, batch: RaggedBatch
        ) -> tuple[Float[Array, "T E"], RecurrentState]: ...

    @compiled_call()
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        state: RecurrentState | None = None,
        *,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        batch: RaggedBatch | None = None,
    ) -> Float[Array, "*B T E"] | tuple[Float[Array, "*B T E"], RecurrentState]:
        """**Arguments:**

        - `x`: `[..., T, E]` with any number of leading axes.
        - `state`: the state after the tokens before `x`. Processing a prompt at once, in chunks or token by token, with rows at different
            positions, returns the same as processing whole sequences at once. A single token (`T = 1`) uses the `step` of the operation.
        - `padding_mask`: bool `[..., T]`, True for real tokens. Padding may be anywhere, may hold NaN, and leaves the state unchanged; outputs
            at padding positions are undefined.
        - `segment_ids`: integers `[..., T]`; a new segment, which sees no earlier tokens, starts where the id changes. Negative ids are
            padding. The state enters the first segment of the row; the new one is that of the last segment.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, with `x` of shape `[T, E]` and a state of batch shape
            `(N,)`. Tokens past the last offset are padding.
        - `batch`: an `ejkernel_eqx.RaggedBatch`, for serving. `x [T, E]` holds the new tokens of its sequences and `state` is a pool
            `[slots, ...]`, with the slot of each sequence in `batch.state_indices`. Slots must be distinct; for -1 nothing is stored and
            outputs are undefined. A sequence without earlier tokens starts from zeros, independent of its slot's content. Slots without
            new tokens are unchanged. Donate the pool for writing in place. For a pool with `num_draft_tokens`, call its method `accept`
            afterwards to keep only some of the new tokens.

        **Returns:** `y`, in the shape of `x` and the dtype of the computation; with a state, the tuple `(y, state)`. Raises `ValueError` for
        invalid arguments; values are checked when they are known (outside `jit`).
        """
        tokens = {"padding_mask": padding_mask, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        return self._called(x, state, batch, tokens, {})

    def _called(self, x: Any, state: Any, batch: Any, tokens: Any, beside: dict[str, Array]) -> Any:
        """A call. `beside`: other features of the tokens of `x`, by name."""
        with jax.named_scope(f"ejx.nn.{type(self).__name__}"):
            if batch is None:
                x = self._check(x, state, **tokens)
            else:
                x, state = self._check_ragged(x, state, batch, tokens)
            x = x.astype(compute_dtype_of(self.compute_dtype, self._projections(), x))
            beside = {name: other.astype(x.dtype) for name, other in beside.items()}
            if batch is not None:
                return self._mix_ragged(x, state, batch, beside)
            rows = _rows_of(x, state, tokens)
            rows.beside = {name: clear(other, rows.real) for name, other in beside.items()}
            y = self._mix(clear(x, rows.real), rows)
            return y if state is None else (y, rows.left)

    def _check(self, x: Any, state: Any, padding_mask: Any, segment_ids: Any, cu_seqlens: Any) -> Array:
        x = read_tokens(x, self.embed_dim, padding_mask, segment_ids)
        batch = x.shape[:-2]
        if cu_seqlens is not None:
            others = {"segment_ids": segment_ids, "padding_mask": padding_mask}
            remedy = "tokens past the last offset are padding already"
            cu_seqlens = read_packed(x, cu_seqlens, others, remedy)
            batch = (cu_seqlens.shape[0] - 1,)
        if state is not None:
            self._check_state(state, batch)
            if state.drafts is not None:
                raise ValueError(
                    "batch: expected a RaggedBatch with a pool that keeps drafts, received None; for other calls build the state without "
                    "num_draft_tokens."
                )
        return x

    def _check_state(self, state: Any, batch: tuple[int, ...]) -> None:
        if not isinstance(state, RecurrentState):
            raise ValueError(
                f"state: expected a RecurrentState or None, received {type(state).__name__}; build it with init_state."
            )
        arrays = (
            *state.conv,
            *(state.recurrent if isinstance(state.recurrent, tuple) else (state.recurrent,)),
        )
        found = tuple(read_array("state", a, "floats", "as init_state makes them").shape for a in arrays)
        expected = tuple(self._state_shapes(batch))
        if found != expected:
            raise ValueError(
                f"state: expected arrays of shapes {expected}, received {found}; build it with init_state({batch})."
            )

    def _check_ragged(
        self, x: Any, state: Any, batch: RaggedBatch, tokens: TokenInputs
    ) -> tuple[Array, RecurrentState]:
        x = check_ragged(x, batch, self.embed_dim, tokens)
        if not isinstance(state, RecurrentState):
            raise ValueError(
                f"state: expected a RecurrentState with a batch, one slot per sequence, received {type(state).__name__}; build it with "
                "init_state(num_slots)."
            )
        shape = _shape_of(state)
        if shape[:1] in ((), (0,)):
            raise ValueError(
                f"state: expected a pool with slots, received shape {shape}; build it with init_state(num_slots)."
            )
        self._check_state(state, shape[:1])
        if batch.state_indices is None:
            raise ValueError(
                "batch: expected state_indices, the slot of each sequence's state, received None; pass state_indices= to RaggedBatch.build."
            )
        check_slots("batch.state_indices", batch.state_indices, shape[0])
        return x, state

    def _mix_ragged(
        self, x: Array, pool: RecurrentState, batch: RaggedBatch, beside: dict[str, Array]
    ) -> tuple[Any, RecurrentState]:
        """A call with a batch: reads states from the pool and writes them back."""
        if 0 in (x.shape[0], batch.lengths.shape[0]):
            like = eqx.filter_eval_shape(lambda: self._mix(x, Rows(0, beside=beside)))
            return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), like), pool
        assert batch.state_indices is not None
        x, slots = clear(x, batch.is_real), batch.state_indices
        beside = {name: clear(other, batch.is_real) for name, other in beside.items()}
        new = new_tokens(batch)
        there = (new > 0) & (slots >= 0) & (slots < _shape_of(pool)[0])
        starts = jnp.zeros_like(there) if batch.of_rows else batch.lengths <= new
        # The slot of each sequence, the one to read from, and the one to clear first; -1 for none.
        kept, entering, starting = (
            jnp.where(which, slots, -1).astype(jnp.int32)
            for which in (there, there & ~starts, there & starts)
        )
        if batch.is_decode and pool.drafts is None:
            # On the pool itself, after clearing the slots of sequences that start.
            if not batch.of_rows:
                pool = jax.tree.map(lambda x: _put(x, starting, jnp.zeros((), x.dtype)), pool)
                ids = batch.sequence_ids
                kept = jnp.where(ids >= 0, kept[jnp.maximum(ids, 0)], -1)
            beside = {name: other[:, None] for name, other in beside.items()}
            rows = Rows(1, pool, step=True, slots=kept, beside=beside)
            return jax.tree.map(lambda y: y[:, 0], self._mix(x[:, None], rows)), rows.left
        states = jax.tree.map(lambda x: _take(x, entering), pool)
        rows = Rows(0, states, cu_seqlens=batch.query_start_loc, beside=beside)
        y = self._mix(x, rows)
        return y, jax.tree.map(lambda x, new: _put(x, kept, new), pool, rows.left_by(batch))


def _rows_of(x: Array, state: RecurrentState | None, tokens: dict[str, Any]) -> Rows:
    """The rows of a call without a batch; `tokens` are its padding mask, segment ids and offsets by name."""
    axis = x.ndim - 2
    if tokens["cu_seqlens"] is not None:
        offsets, real = packed(tokens["cu_seqlens"], x.shape[-2])
        return Rows(axis, state, real, cu_seqlens=offsets)
    ids = ids_of(tokens["segment_ids"], tokens["padding_mask"])
    real = None if ids is None else ids >= 0
    return Rows(axis, state, real, ids, step=state is not None and x.shape[-2] == 1)


def _shape_of(state: RecurrentState) -> tuple[int, ...]:
    """Of the recurrent state, of a tuple that of the first."""
    return jax.tree.leaves(state.recurrent)[0].shape


def _take(pool: Array, slots: Array) -> Array:
    """Rows of a pool `[slots, ...]`; zeros for -1."""
    rows = pool.at[slots].get(mode="clip", wrap_negative_indices=False)
    there = (slots >= 0).reshape(-1, *(1,) * (pool.ndim - 1))
    return jnp.where(there, rows, jnp.zeros((), pool.dtype))


def _put(pool: Array, slots: Array, rows: Array) -> Array:
    """The pool with updated rows; those for -1 are dropped."""
    nowhere = pool.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32)
    where = jnp.where(slots >= 0, slots, nowhere)
    return pool.at[where].set(
        rows.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
