"""`CellLayer`: stacked recurrent networks, in one or both directions, with the parameters of PyTorch; and their state."""

from typing import Any, ClassVar, overload, TYPE_CHECKING, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int
from .._signatures import Module
from ..cells import Recurrent
from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from ..weights.fill import replaced
from ..weights.view import Weights
from .arguments import checked, read_array, read_batch_shape, read_dtype, read_packed, read_tokens
from .parts import Parts
from .projection import compute_dtype_of, product, stored_dtype_of
from .signatures import CellInputs, Output, Tokens
from .tokens import clear, ids_of, packed

L = TypeVar("L", bound="CellLayer")
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


class CellState(Module):
    """The state of an `LSTM`, `GRU` or `RNN` after all tokens so far, one row per sequence. `L` counts layers times directions, in PyTorch's
    order: the directions of the first layer, then of the second.

    A state is immutable: a call takes one and returns the next.

    - `hidden`: `[..., L, H]`. PyTorch's `h_n` has the axis `L` first.
    - `cell`: the same, for an `LSTM`; otherwise `None`.
    """

    hidden: Float[Array, "... L H"]
    cell: Float[Array, "... L H"] | None = None


class CellLayer(Module):
    """Base class of `LSTM`, `GRU` and `RNN`: `num_layers` layers, each of which reads the outputs of the one before it, in one or both
    directions.

    Parameters are those of PyTorch's layer: its names are the keys of `weights`, and shapes and the order of gates are
    the same. So `ejkernel_eqx.load_published` loads its `state_dict`. The projections of PyTorch's `proj_size` are not
    supported.
    """

    weights: dict[str, Array]
    """`weight_ih_l{k}` `[G, I]`, `weight_hh_l{k}` `[G, H]`, `bias_ih_l{k}` and `bias_hh_l{k}` `[G]` for layer `k`, with `_reverse` for the second
    direction."""

    recurrence: Recurrent
    reverse_recurrence: Recurrent | None
    dropout: eqx.nn.Dropout
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _cell: ClassVar[str]

    @checked
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        use_bias: bool = True,
        bidirectional: bool = False,
        dropout_rate: float = 0.0,
        activation: str = "tanh",
        gate_activation: str = "sigmoid",
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `input_size`, `hidden_size`: features `E` of the input and `H` of each direction. The output has `O = H` features, or `2 H` if
            `bidirectional`: first those of the forward direction.
        - `num_layers`: number of stacked layers.
        - `use_bias`: whether there are biases.
        - `bidirectional`: whether each layer also runs from the last token to the first.
        - `dropout_rate`: of the outputs of all layers but the last, during training.
        - `activation`, `gate_activation`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.Recurrent`][]; an `RNN` has no gates.
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `compute_dtype`: dtype of the computation and the output; inputs and weights are cast to it. Default: the promoted dtype of the two.
        - `key`: PRNG key for the initial parameters, uniform in $\pm 1 / \sqrt{H}$.

        **Raises:** `ValueError` for invalid arguments.
        """
        if not 0.0 <= dropout_rate < 1.0:
            raise ValueError(f"dropout_rate: expected a probability in [0, 1), received {dropout_rate}.")
        if self._cell == "rnn" and gate_activation != "sigmoid":
            raise ValueError(
                f"gate_activation: expected 'sigmoid', received {gate_activation!r}; an RNN has no gates, so only its activation can be chosen."
            )
        options: Any = {"activation": activation, "gate_activation": gate_activation}
        options |= {"state_dtype": state_dtype, "platform": platform, "config": config}
        self.recurrence = Recurrent(self._cell, **options)
        self.reverse_recurrence = Recurrent(self._cell, reverse=True, **options) if bidirectional else None
        self.dropout = eqx.nn.Dropout(dropout_rate)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.use_bias = use_bias
        shapes, bound = self._shapes(), hidden_size**-0.5
        parts = Parts(key, len(shapes), dtype, compute_dtype)
        self.weights = {name: parts.uniform(shape, bound) for name, shape in shapes.items()}
        self.compute_dtype = parts.compute_dtype

    @property
    def num_directions(self) -> int:
        return 1 if self.reverse_recurrence is None else 2

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters by name, in the order of PyTorch."""
        gates, found = _GATES[self._cell] * self.hidden_size, {}
        for layer in range(self.num_layers):
            features = self.input_size if layer == 0 else self.num_directions * self.hidden_size
            for end in self._suffixes(layer):
                found |= {f"weight_ih{end}": (gates, features), f"weight_hh{end}": (gates, self.hidden_size)}
                found |= {f"bias_ih{end}": (gates,), f"bias_hh{end}": (gates,)} if self.use_bias else {}
        return found

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.num_directions]

    def _published(self, weights: Weights) -> Any:
        """The parameters have no prefix of their own."""
        new = {name: weights.take(name, x.shape, x.dtype) for name, x in self.weights.items()}
        return replaced(self, {"weights": new})

    def init_state(
        self, batch_shape: tuple[int, ...] | int = (), dtype: DTypeLike | None = None
    ) -> CellState:
        """Returns the state before the first token: zeros.

        **Arguments:**

        - `batch_shape`: leading axes. `()` is for one sequence, and an integer `B` means `(B,)`. For `N` packed
            sequences it is `N`.
        - `dtype`: default float32 (float64 for float64), or the `state_dtype` passed at construction.
        """
        stored = accumulator(stored_dtype_of(self.compute_dtype, self.weights))
        dtype = self.recurrence.state_dtype or stored if dtype is None else read_dtype("dtype", dtype)
        count = self.num_layers * self.num_directions
        zeros = jnp.zeros((*read_batch_shape(batch_shape), count, self.hidden_size), dtype)
        return CellState(zeros, zeros if self._cell == "lstm" else None)

    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int = (),
        max_length: int | None = None,
        dtype: DTypeLike | None = None,
    ) -> CellState:
        """Returns `init_state(batch_shape, dtype)`, by the name that attention layers have, so that a model can treat both alike.
        `max_length` is not used: a state holds any number of tokens."""
        return self.init_state(batch_shape, dtype)

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tokens, state: None = None, **tokens: Unpack[CellInputs]) -> Output: ...

        @overload
        def __call__(
            self, x: Tokens, state: CellState, **tokens: Unpack[CellInputs]
        ) -> tuple[Output, CellState]: ...

    @compiled_call()
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        state: CellState | None = None,
        *,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        lengths: Int[AnyArray, "*B"] | None = None,
        resets: Bool[AnyArray, "*B T"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Float[Array, "*B T O"] | tuple[Float[Array, "*B T O"], CellState]:
        """**Arguments:**

        - `x`: `[..., T, E]` with any number of leading axes; PyTorch's `batch_first=True`.
        - `state`: the state before `x`, from `init_state` or a call. In one direction, processing a sequence in pieces, down to single tokens,
            returns the same as at once. In both, the state of the second direction enters the last token.
        - `padding_mask`: bool `[..., T]`, True for real tokens. Padding may be anywhere and hold NaN; it leaves the state unchanged, and outputs
            there are 0.
        - `lengths`: integers `[...]`, the number of real tokens of each row, from 0 to `T`; those behind are padding.
        - `resets`: bool `[..., T]`: a new sequence starts at these tokens, from a state of zeros, such as an episode. No direction sees across.
        - `segment_ids`: integers `[..., T]`; a new segment, which sees no earlier tokens, starts where the id changes. Negative ids are padding.
            The state enters the first segment of the row (the last one in the second direction).
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, with `x` of shape `[T, E]` and a state of batch shape `(N,)`; not with other
            descriptions of tokens. Tokens outside are padding.
        - `key`: PRNG key, required for dropout between layers outside inference mode.
        - `inference`: overrides the flag set by `equinox.nn.inference_mode`.

        **Returns:** `y`, `[..., T, O]` in the dtype of the computation; with a state, the tuple `(y, state)`.

        **Raises:** `ValueError` for invalid arguments; values are checked when they are known (outside `jit`).
        """
        with jax.named_scope(f"ejx.nn.{type(self).__name__}"):
            x = read_tokens(x, self.input_size, padding_mask, segment_ids)
            tokens = {"lengths": lengths, "resets": resets, "cu_seqlens": cu_seqlens}
            self._check(x, state, tokens, padding_mask, segment_ids)
            drops = self.dropout.p > 0 and not (self.dropout.inference if inference is None else inference)
            if drops and key is None and self.num_layers > 1:
                raise ValueError(
                    "key: expected a PRNG key because dropout_rate > 0, received None; pass key=, or inference=True to disable dropout."
                )
            tokens["segment_ids"] = ids_of(segment_ids, padding_mask)
            matrices = [w for w in self.weights.values() if w.ndim == 2]
            x = x.astype(compute_dtype_of(self.compute_dtype, (), x, *matrices))
            y, left = self._stack(_cleared(x, tokens), state, tokens, key if drops else None)
            return y if state is None else (y, left)

    def _check(
        self, x: Array, state: Any, tokens: dict[str, Any], padding_mask: Any, segment_ids: Any
    ) -> None:
        batch, cu_seqlens = x.shape[:-2], tokens["cu_seqlens"]
        if cu_seqlens is not None:
            others = {"padding_mask": padding_mask, "segment_ids": segment_ids, **tokens, "cu_seqlens": None}
            remedy = "tokens outside the offsets are padding already, and each sequence has its own"
            cu_seqlens = read_packed(x, cu_seqlens, others, remedy)
            batch = (cu_seqlens.shape[0] - 1,)
        if state is None:
            return
        if not isinstance(state, CellState) or (state.cell is not None) != (self._cell == "lstm"):
            found = type(state).__name__
            raise ValueError(
                f"state: expected a CellState of this kind of layer or None, received {found}; build it with init_state."
            )
        expected = (*batch, self.num_layers * self.num_directions, self.hidden_size)
        for name, array in (("hidden", state.hidden), ("cell", state.cell)):
            if array is None:
                continue
            shape = read_array(f"state.{name}", array, "floats", "as init_state makes it").shape
            if shape != expected:
                raise ValueError(
                    f"state: expected arrays of shape {expected}, received {shape}; build it with init_state({batch})."
                )

    def _stack(
        self, x: Array, state: CellState | None, tokens: dict[str, Any], key: PRNGKeyArray | None
    ) -> tuple[Array, CellState]:
        keys = [None] * self.num_layers if key is None else [*jax.random.split(key, self.num_layers)]
        left: list[Any] = []
        for layer in range(self.num_layers):
            if layer and key is not None:
                x = self.dropout(x, key=keys[layer], inference=False)
            outs = []
            for operation, end in zip((self.recurrence, self.reverse_recurrence), self._suffixes(layer)):
                assert operation is not None
                entering = None if state is None else self._part(state, len(left))
                out, new = self._one(operation, end, x, entering, tokens)
                outs.append(out)
                left.append(new)
            x = outs[0] if len(outs) == 1 else jnp.concatenate(outs, -1)
        if self._cell == "lstm":
            hidden, cell = (jnp.stack([new[i] for new in left], -2) for i in range(2))
            return x, CellState(hidden, cell)
        return x, CellState(jnp.stack(left, -2))

    def _part(self, state: CellState, index: int) -> Any:
        hidden = state.hidden[..., index, :]
        return hidden if state.cell is None else (hidden, state.cell[..., index, :])

    def _one(self, operation: Recurrent, end: str, x: Array, state: Any, tokens: dict[str, Any]) -> Any:
        """One layer in one direction."""
        parameter = lambda name: self.weights.get(f"{name}{end}")
        weight = self.weights[f"weight_ih{end}"]
        expected = self._shapes()[f"weight_ih{end}"]
        if weight.shape != expected:
            raise ValueError(
                f"weight_ih{end}: expected shape {expected}, received {weight.shape}; use jax.vmap over stacked layers."
            )
        return operation(
            product(x, weight),
            self.weights[f"weight_hh{end}"].astype(x.dtype),
            parameter("bias_hh"),
            bias_ih=parameter("bias_ih"),
            initial_state=state,
            **tokens,
        )


def _cleared(x: Array, tokens: dict[str, Any]) -> Array:
    """Zeros at padding, before the first product: NaN there would reach the gradients of weights as 0 * NaN."""
    if tokens["cu_seqlens"] is not None:
        return clear(x, packed(tokens["cu_seqlens"], x.shape[-2])[1])
    if tokens["segment_ids"] is not None:
        x = clear(x, tokens["segment_ids"] >= 0)
    if tokens["lengths"] is not None:
        lengths = read_array("lengths", tokens["lengths"], "integers", "[...]")
        if lengths.shape != x.shape[:-2]:
            raise ValueError(
                f"lengths: expected shape {x.shape[:-2]}, one per row of x, received {lengths.shape}."
            )
        time = jnp.arange(x.shape[-2], dtype=jnp.int32)
        x = clear(x, like(time, x[..., 0]) < lengths.astype(jnp.int32)[..., None])
    return x
