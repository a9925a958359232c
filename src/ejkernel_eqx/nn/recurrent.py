"""What the layers of linear time share: their state, where the tokens of a call sit, how a call runs."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, overload, TypedDict, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..core.arguments import accumulator
from ..paged import RaggedBatch
from ..sequences.packing import read_offsets
from .arguments import check_slots, check_tokens, read_array, read_batch_shape, read_dtype, read_features
from .projection import compute_dtype_of, stored_dtype_of
from .short_convolution import ShortConvolution
from .tokens import check_ragged, clear

L = TypeVar("L", bound="RecurrentLayer")


class RecurrentState(eqx.Module):
    """What a recurrent layer keeps of the tokens seen so far, a row for each sequence. Its size never grows.

    A pure value: a call takes one and gives the next. All leaves share their leading dimensions, so a state
    with batch shape `(layers, B)` may be scanned over together with stacked layers.

    - `conv`: one array for each short convolution of the layer, the last $W - 1$ inputs `[..., W - 1, C]`, the
        oldest first.
    - `recurrent`: the state of the layer's recurrence, with the shape that the operation gives it.
    """

    conv: tuple[Array, ...]
    recurrent: Array


@dataclasses.dataclass(eq=False)
class Rows:
    """Where the tokens of a call sit, what was before them, and how the parts of a layer run over them: each short convolution once, in the
    order of their states, then the recurrence."""

    tokens_axis: int
    state: RecurrentState | None = None
    real: Array | None = None  # bool [..., T]
    segment_ids: Array | None = None
    cu_seqlens: Array | None = None
    step: bool = False
    """One token a row, after a state."""
    slots: Array | None = None
    """Int32 `[rows]`, of a step: where each row's state is in the pool that `state` is then, -1 for nowhere."""
    _left: list[Array] = dataclasses.field(default_factory=list)

    def convolve(self, layer: ShortConvolution, x: Array) -> Array:
        """The next short convolution of the layer."""
        return self.run(layer.convolution, {"x": x}, {"weight": layer.weight[:, 0], "bias": layer.bias})

    def run(
        self, operation: Any, tokens: dict[str, Array], parameters: dict[str, Any] | None = None
    ) -> Array:
        """`operation` over `tokens` (arrays with an axis of time), with `parameters` that have none, from the next state."""
        old = None if self.state is None else (*self.state.conv, self.state.recurrent)[len(self._left)]
        parameters = parameters or {}
        if self.step:
            now = {name: jnp.squeeze(x, self.tokens_axis) for name, x in tokens.items()}
            out, new = operation.step(**now, **parameters, state=old, state_indices=self.slots)
            out = jnp.expand_dims(out, self.tokens_axis)
            if self.real is not None:  # rows whose token is padding stand still
                assert old is not None
                real = self.real.reshape(*self.real.shape[:-1], *(1,) * (new.ndim - self.tokens_axis))
                new = jnp.where(real, new, old)
        else:
            packing = {"segment_ids": self.segment_ids, "cu_seqlens": self.cu_seqlens}
            out, new = operation(**tokens, **parameters, initial_state=old, **packing)
        self._left.append(new)
        return out

    @property
    def left(self) -> RecurrentState:
        """What the parts have left behind."""
        return RecurrentState(tuple(self._left[:-1]), self._left[-1])


class _Tokens(TypedDict, total=False):
    """What a call may say of its tokens."""

    padding_mask: Array | None
    segment_ids: Array | None
    cu_seqlens: Array | None


class RecurrentLayer(eqx.Module):
    """A layer that mixes tokens in time linear in their number, and decodes from a state that never grows.

    The parameters of each have the names and shapes of the published model code; the guide "Recurrent layers" has the calls and the table of
    names. All are built with these arguments, besides those that they say themselves:

    - `embed_dim`: features of the input and the output, `E`.
    - `norm_eps`: what is added to the mean square, where there is a norm.
    - `state_dtype`, `platform`, `config`: as in the operation inside; the platform is that of the short convolutions and the norm as well.
    - `dtype`: of the parameters, but that those that say how fast things are forgotten (`A_log`, `D`, and `dt_bias` where it is a parameter of
        its own) are at least float32; default float32 (float64 in JAX's 64-bit mode).
    - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
        what the two promote to.
    - `key`: a PRNG key for the initial weights.
    """

    recurrence: eqx.AbstractVar[Any]
    """The operation, one of `ejkernel_eqx.recurrence` or `ejkernel_eqx.selective_scan`."""

    embed_dim: eqx.AbstractVar[int]

    compute_dtype: eqx.AbstractVar[str | None]

    _options_of: ClassVar[Callable[..., dict[str, Any]] | None] = None
    """The arguments of the layer from a published configuration and a layer's place."""

    @abc.abstractmethod
    def _mix(self, x: Array, rows: Rows) -> Array:
        """The layer itself, over tokens whose padding is zero."""

    @abc.abstractmethod
    def _kept(self) -> tuple[Sequence[ShortConvolution], tuple[int, ...]]:
        """What has a state: the short convolutions, and the shape of the recurrence's own, without leading dimensions."""

    @abc.abstractmethod
    def _projections(self) -> tuple[Any, ...]:
        """What the layer multiplies by."""

    @classmethod
    def from_config(
        cls: type[L], config: Mapping[str, Any], /, *, layer_index: int = 0, key: Array, **options: Any
    ) -> L:
        """The layer of a published model, with initial weights: `ejkernel_eqx.load_published` fills it. The guide "Recurrent layers" has the
        table of models.

        **Arguments:**

        - `config`: the dictionary of the model's `config.json`, or `config.to_dict()` of `transformers`.
        - `layer_index`: which layer of the model, from 0.
        - `key`: a PRNG key for the initial weights.
        - `options`: more arguments of the constructor, `dtype` say; they take precedence over what the configuration says.

        Raises `ValueError` for a model or an option that is not known here.
        """
        if cls._options_of is None:
            raise ValueError(
                f"from_config: expected a layer with a published counterpart, received {cls.__name__}; build it from its own arguments."
            )
        given: dict[str, Any] = {**cls._options_of(config, layer_index), **options}
        return cls(**given, key=key)  # pyright: ignore[reportCallIssue]

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, self._projections())

    def _state_shapes(self, batch: tuple[int, ...]) -> list[tuple[int, ...]]:
        convolutions, recurrent = self._kept()
        shapes = [*((layer.width - 1, layer.channels) for layer in convolutions), recurrent]
        return [(*batch, *shape) for shape in shapes]

    def init_state(
        self, batch_shape: tuple[int, ...] | int, dtype: DTypeLike | None = None
    ) -> RecurrentState:
        """The state before the first token: zeros.

        **Arguments:**

        - `batch_shape`: the leading dimensions; `()` for one sequence, an integer `B` for `(B,)`.
        - `dtype`: of the convolutions' inputs, by default what the layer computes in, or else that of its weights. The recurrent
            state is float32 (float64 for float64), or what `state_dtype` said at construction.
        """
        *conv, recurrent = self._state_shapes(read_batch_shape(batch_shape))
        stored = self._stored_dtype()
        dtype = stored if dtype is None else read_dtype("dtype", dtype)
        return RecurrentState(
            conv=tuple(jnp.zeros(shape, dtype) for shape in conv),
            recurrent=jnp.zeros(recurrent, self.recurrence.state_dtype or accumulator(stored)),
        )

    @overload
    def __call__(self, x: Array, state: None = None, **tokens: Unpack[_Tokens]) -> Array: ...

    @overload
    def __call__(
        self, x: Array, state: RecurrentState, **tokens: Unpack[_Tokens]
    ) -> tuple[Array, RecurrentState]: ...

    @overload
    def __call__(
        self, x: Array, state: RecurrentState, *, batch: RaggedBatch
    ) -> tuple[Array, RecurrentState]: ...

    def __call__(
        self,
        x: Array,
        state: RecurrentState | None = None,
        *,
        padding_mask: Array | None = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | None = None,
        batch: RaggedBatch | None = None,
    ) -> Array | tuple[Array, RecurrentState]:
        """**Arguments:**

        - `x`: `[..., T, E]`, any number of leading batch dimensions.
        - `state`: what the tokens before `x` left. A prompt at once or in chunks and then token by token, rows at
            different positions: all give what the whole sequence at once gives. One token (T = 1) takes the
            operation's `step`.
        - `padding_mask`: bool `[..., T]`, True for real tokens. Padding, wherever it is, is not read (it may hold
            NaN) and leaves the state as it is; the output there is of no meaning.
        - `segment_ids`: integers `[..., T]`; a new segment, which sees nothing of what is before it, starts where the
            id changes; negative is padding. The state enters the row's first segment; the new one is the last one's.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (`x` is `[T, E]` then, a state has batch shape `(N,)`);
            tokens past the last are padding.
        - `batch`: for serving, an `ejkernel_eqx.RaggedBatch`: `x` is `[T, E]`, the new tokens of its sequences, and
            `state` a pool of slots `[slots, ...]`, in which `batch.state_indices` says where each sequence's state is (-1: it has
            none, nothing is kept, and what its tokens give is of no meaning). No slot may be given twice. A sequence whose tokens are
            all new starts from zeros, whatever its slot holds; slots of no sequence, or of one without new tokens, are not touched.
            Donate the pool to have it written in place.

        **Returns:** `y`, an array of the shape of `x` in the dtype that the layer computes in; with a state, the tuple
        `(y, state)`. Raises `ValueError` for arguments that do not fit, as far as their values are known.
        """
        tokens: _Tokens = {"padding_mask": padding_mask, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        with jax.named_scope(f"ejx.nn.{type(self).__name__}"):
            if batch is not None:
                x, state = self._check_ragged(x, state, batch, tokens)
                return self._mix_ragged(self._cast(x), state, batch)
            x = self._cast(self._check(x, state, **tokens))
            rows = _rows_of(x, state, **tokens)
            y = self._mix(clear(x, rows.real), rows)
            return y if state is None else (y, rows.left)

    def _cast(self, x: Array) -> Array:
        return x.astype(compute_dtype_of(self.compute_dtype, self._projections(), x))

    def _check(self, x: Any, state: Any, padding_mask: Any, segment_ids: Any, cu_seqlens: Any) -> Array:
        x = read_features("x", x, "[..., T, E]", "E", self.embed_dim)
        check_tokens("padding_mask", padding_mask, "booleans", "x", x)
        check_tokens("segment_ids", segment_ids, "integers", "x", x)
        batch = x.shape[:-2]
        if cu_seqlens is not None:
            cu_seqlens = read_array("cu_seqlens", cu_seqlens, "integers", "[N + 1]")
            other = "padding_mask" if segment_ids is None else "segment_ids"
            if padding_mask is not None or segment_ids is not None:
                raise ValueError(
                    f"cu_seqlens: expected None with {other}, received both; tokens past the last offset are padding."
                )
            if x.ndim != 2 or cu_seqlens.ndim != 1 or not cu_seqlens.size:
                raise ValueError(
                    f"cu_seqlens: expected offsets [N + 1] and x of shape [T, E], received {cu_seqlens.shape} and "
                    f"{x.shape}; pack all sequences into one row."
                )
            batch = (cu_seqlens.shape[0] - 1,)
        if state is not None:
            self._check_state(state, batch)
        return x

    def _check_state(self, state: Any, batch: tuple[int, ...]) -> None:
        if not isinstance(state, RecurrentState):
            raise ValueError(
                f"state: expected a RecurrentState or None, received {type(state).__name__}; build it with init_state."
            )
        arrays = (*state.conv, state.recurrent)
        found = tuple(read_array("state", a, "floats", "as init_state makes them").shape for a in arrays)
        expected = tuple(self._state_shapes(batch))
        if found != expected:
            raise ValueError(
                f"state: expected arrays of shapes {expected}, received {found}; build it with init_state({batch})."
            )

    def _check_ragged(
        self, x: Any, state: Any, batch: RaggedBatch, tokens: _Tokens
    ) -> tuple[Array, RecurrentState]:
        x = check_ragged(x, batch, self.embed_dim, tokens)
        if not isinstance(state, RecurrentState):
            raise ValueError(
                f"state: expected a RecurrentState with batch, a slot for each sequence, received {type(state).__name__}; build it with "
                "init_state(num_slots)."
            )
        if state.recurrent.ndim == 0 or state.recurrent.shape[0] == 0:
            raise ValueError(
                f"state: expected a pool with slots, received shape {state.recurrent.shape}; build it with init_state(num_slots)."
            )
        self._check_state(state, state.recurrent.shape[:1])
        if batch.state_indices is None:
            raise ValueError(
                "batch: expected state_indices, the slot of each sequence's state, received None; pass state_indices= to RaggedBatch.build."
            )
        check_slots("batch.state_indices", batch.state_indices, state.recurrent.shape[0])
        return x, state

    def _mix_ragged(self, x: Array, pool: RecurrentState, batch: RaggedBatch) -> tuple[Array, RecurrentState]:
        """The tokens of a batch, from the states in the pool and back to them."""
        if 0 in (x.shape[0], batch.lengths.shape[0]):
            return jnp.zeros_like(x), pool
        assert batch.state_indices is not None
        x, slots = clear(x, batch.is_real), batch.state_indices
        new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        there = (new > 0) & (slots >= 0) & (slots < pool.recurrent.shape[0])
        starts = batch.lengths <= new
        # Each sequence's slot, the one to read from and the one to make empty first; -1 for none.
        kept, entering, starting = (
            jnp.where(which, slots, -1).astype(jnp.int32)
            for which in (there, there & ~starts, there & starts)
        )
        if batch.is_decode:
            # On the pool itself, in which only those that start must be made empty first.
            pool = jax.tree.map(lambda x: _put(x, starting, jnp.zeros((), x.dtype)), pool)
            ids = batch.sequence_ids
            rows = Rows(1, pool, step=True, slots=jnp.where(ids >= 0, kept[jnp.maximum(ids, 0)], -1))
            return self._mix(x[:, None], rows)[:, 0], rows.left
        states = jax.tree.map(lambda x: _take(x, entering), pool)
        rows = Rows(0, states, cu_seqlens=batch.query_start_loc)
        y = self._mix(x, rows)
        return y, jax.tree.map(lambda x, new: _put(x, kept, new), pool, rows.left)


def _rows_of(
    x: Array,
    state: RecurrentState | None,
    padding_mask: Array | None,
    segment_ids: Array | None,
    cu_seqlens: Array | None,
) -> Rows:
    axis = x.ndim - 2
    if cu_seqlens is not None:
        cu_seqlens = read_offsets(cu_seqlens, x.shape[-2])
        tokens = jnp.arange(x.shape[-2], dtype=jnp.int32)
        real = (tokens >= cu_seqlens[0]) & (tokens < cu_seqlens[-1])
        return Rows(axis, state, real, cu_seqlens=cu_seqlens)
    if padding_mask is not None:
        segment_ids = jnp.where(padding_mask, jnp.int32(0) if segment_ids is None else segment_ids, -1)
    real = None if segment_ids is None else segment_ids >= 0
    return Rows(axis, state, real, segment_ids, step=state is not None and x.shape[-2] == 1)


def _take(pool: Array, slots: Array) -> Array:
    """The rows of a pool `[slots, ...]`; zeros for -1."""
    rows = jnp.take(pool, slots, axis=0, mode="clip")
    there = (slots >= 0).reshape(-1, *(1,) * (pool.ndim - 1))
    return jnp.where(there, rows, jnp.zeros((), pool.dtype))


def _put(pool: Array, slots: Array, rows: Array) -> Array:
    """The pool with new rows; those for -1 are dropped."""
    nowhere = pool.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32)
    where = jnp.where(slots >= 0, slots, nowhere)
    return pool.at[where].set(rows.astype(pool.dtype), mode="drop", unique_indices=True)
