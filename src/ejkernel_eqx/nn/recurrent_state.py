"""`RecurrentState`: the state of a recurrent layer; and how the parts of a layer run from it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .._signatures import Module
from ..paged import RaggedBatch
from ..recurrence import DeltaProduct
from ..recurrence.delta import GatedDelta
from .drafts import Drafts, like_rows, new_tokens
from .short_convolution import ShortConvolution


class RecurrentState(Module):
    """The state of a recurrent layer after all tokens so far, one row per sequence. Its size is constant.

    A state is immutable: a call takes one and returns the next. All leaves have the same leading axes, so a state
    with batch shape `(layers, B)` can be scanned over together with stacked layers.

    - `conv`: for each short convolution of the layer, its last $W - 1$ inputs `[..., W - 1, C]`, oldest first.
    - `recurrent`: the state of the recurrence, in the shape of the operation: an array, or a tuple of them.
    - `drafts`: for a pool with `num_draft_tokens`, the last new tokens. They can still be rolled back, and are not part
        of the other two fields yet. Otherwise `None`.
    """

    conv: tuple[Float[Array, "... W-1 C"], ...]
    recurrent: Any
    drafts: Drafts | None = None

    def accept(self, accepted: Int[Numbers, " N"], batch: RaggedBatch) -> "RecurrentState":
        """Keeps only the first `accepted` new tokens of each sequence and discards the others, for speculative decoding. Call it after the
        call that verified the tokens and before the next one; without it all new tokens are kept.

        **Arguments:**

        - `accepted`: integers `[N]`, traced or not, from 0 to the number of new tokens of each sequence; ignored for padded sequences. A
            sequence with more new tokens than `num_draft_tokens` keeps all of them.
        - `batch`: the batch of the call.

        **Raises:** `ValueError` for a pool without `num_draft_tokens`, a wrong shape or (when values are known) numbers out of range.
        """
        if self.drafts is None:
            raise ValueError(
                "accept: expected a pool that keeps drafts, received one that does not; build it with num_draft_tokens, the maximum number of new "
                "tokens per sequence to roll back."
            )
        return dataclasses.replace(self, drafts=self.drafts.accept(accepted, batch))


@dataclasses.dataclass(eq=False)
class Rows:
    """The rows of a call: their tokens, the states before them, and how the parts of a layer run over them (each short convolution once, in
    the order of their states, then the recurrence)."""

    tokens_axis: int
    state: RecurrentState | None = None
    real: AnyArray | None = None  # bool [..., T]
    segment_ids: AnyArray | None = None
    cu_seqlens: AnyArray | None = None
    step: bool = False
    """Whether there is one token per row, with a state."""
    slots: Array | None = None
    """For a step on a pool: the slot of each row, int32 `[rows]`; -1 for none."""
    beside: dict[str, Array] = dataclasses.field(default_factory=dict)
    """Other features of the tokens, with zeros at padding positions, of layers that take some."""
    given: list[dict[str, Array]] = dataclasses.field(default_factory=list)
    """The inputs of each part so far."""
    _before: list[Any] = dataclasses.field(default_factory=list)
    _left: list[Any] = dataclasses.field(default_factory=list)

    def normalises(self, recurrence: Any, *layers: ShortConvolution) -> bool:
        """Returns whether short convolutions can normalise the heads of queries and keys in their pass over memory, for a recurrence that does so
        otherwise. A state is that of operations that do so themselves."""
        asked = isinstance(recurrence, GatedDelta | DeltaProduct) and recurrence.options.use_qk_l2norm
        return (
            asked and self.state is None and all(layer.convolution.sequence_axis is None for layer in layers)
        )

    def convolve(self, layer: ShortConvolution, x: Array, norm_size: int | None = None) -> Array:
        """Runs the next short convolution of the layer; `norm_size` as in `CausalConv1d`."""
        operation = layer.convolution if norm_size is None else layer.convolution.normalising(norm_size)
        return self.run(operation, {"x": x}, {"weight": layer.weight[:, 0], "bias": layer.bias})

    def convolve_parts(
        self, layer: ShortConvolution, parts: Sequence[Array], norm_sizes: Sequence[int | None]
    ) -> tuple[Array, ...]:
        """Runs the next short convolution of the layer on channels that come in parts, and gives those of the output in the same parts, each with
        its `norm_size`."""
        ends = [*itertools.accumulate([part.shape[-1] for part in parts])]
        if self.state is not None:
            mixed = self.convolve(layer, jnp.concatenate(parts, axis=-1))
            return tuple(jnp.split(mixed, ends[:-1], axis=-1))
        self._before.append(None)
        self.given.append({"x": jnp.concatenate(parts, axis=-1)})
        packing = {"segment_ids": self.segment_ids, "cu_seqlens": self.cu_seqlens}
        outs, states = [], []
        for part, end, size in zip(parts, ends, norm_sizes, strict=True):
            own = slice(end - part.shape[-1], end)
            bias = None if layer.bias is None else layer.bias[own]
            operation = layer.convolution if size is None else layer.convolution.normalising(size)
            out, state = operation(part, layer.weight[own, 0], bias, **packing)
            outs.append(out)
            states.append(state)
        self._left.append(jnp.concatenate(states, axis=-1))
        return tuple(outs)

    def run(
        self, operation: Any, tokens: dict[str, Array], parameters: dict[str, Any] | None = None
    ) -> Array:
        """Runs `operation` from the next state, over `tokens` (arrays with a time axis) and `parameters` (arrays without)."""
        part, parameters = len(self._left), parameters or {}
        old = None if self.state is None else (*self.state.conv, self.state.recurrent)[part]
        if old is not None and self.state is not None and self.state.drafts is not None:
            old = self.state.drafts.replay(part, operation, parameters, old)
        self._before.append(old)
        self.given.append(tokens)
        if self.step:
            now = {name: jnp.squeeze(x, self.tokens_axis) for name, x in tokens.items()}
            out, new = operation.step(**now, **parameters, state=old, state_indices=self.slots)
            out = jnp.expand_dims(out, self.tokens_axis)
            if self.real is not None:  # padding leaves the state unchanged
                real = jnp.squeeze(self.real, -1)
                new = jax.tree.map(lambda new, old: jnp.where(like_rows(real, new), new, old), new, old)
        else:
            packing = {"segment_ids": self.segment_ids, "cu_seqlens": self.cu_seqlens}
            out, new = operation(**tokens, **parameters, initial_state=old, **packing)
        self._left.append(new)
        return out

    @property
    def left(self) -> RecurrentState:
        """The new state."""
        return RecurrentState(tuple(self._left[:-1]), self._left[-1])

    def left_by(self, batch: RaggedBatch) -> RecurrentState:
        """The new state of the sequences of a batch. With drafts: the state before the new tokens, and these tokens."""
        if self.state is None or self.state.drafts is None:
            return self.left
        few = new_tokens(batch) <= self.state.drafts.num_tokens
        pairs = [(old, new) for old, new in zip(self._before, self._left, strict=True) if old is not None]
        keep = lambda old, new: jnp.where(like_rows(few, new), old, new.astype(old.dtype))
        parts = [jax.tree.map(keep, old, new) for old, new in pairs]
        return RecurrentState(tuple(parts[:-1]), parts[-1], self.state.drafts.renewed(self.given, batch))
