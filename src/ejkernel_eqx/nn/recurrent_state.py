"""The state of a recurrent layer, and how a layer's parts run over the tokens of a call from that state."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from ..paged import RaggedBatch
from .drafts import Drafts, like_rows, new_tokens
from .short_convolution import ShortConvolution


class RecurrentState(eqx.Module):
    """What a recurrent layer keeps of the tokens seen so far, a row for each sequence. Its size never grows.

    A pure value: a call takes one and gives the next. All leaves share their leading dimensions, so a state
    with batch shape `(layers, B)` may be scanned over together with stacked layers.

    - `conv`: one array for each short convolution of the layer, the last $W - 1$ inputs `[..., W - 1, C]`, the
        oldest first.
    - `recurrent`: the state of the layer's recurrence, with the shape that the operation gives it.
    - `drafts`: of a pool whose new tokens may be taken back (`num_draft_tokens`), the last of them, which the other two do not contain
        yet; else `None`.
    """

    conv: tuple[Array, ...]
    recurrent: Array
    drafts: Drafts | None = None

    def accept(self, accepted: Any, batch: RaggedBatch) -> "RecurrentState":
        """The pool after only the first `accepted` new tokens of each sequence, as if the others had never been there: for speculative
        decoding, after the call that verified them and before the next one. Without it all of them count.

        **Arguments:**

        - `accepted`: ints `[N]`, traced or not, from 0 to each sequence's new tokens; of padded sequences anything. A sequence with more
            new tokens than `num_draft_tokens` keeps all of them.
        - `batch`: that of the call.

        **Raises:** `ValueError` for a pool without `num_draft_tokens`, another shape or, where they are known, numbers out of range.
        """
        if self.drafts is None:
            raise ValueError(
                "accept: expected a pool that keeps drafts, received one that does not; build it with num_draft_tokens, the most new tokens of a "
                "sequence that may be taken back."
            )
        return dataclasses.replace(self, drafts=self.drafts.accept(accepted, batch))


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
    given: list[dict[str, Array]] = dataclasses.field(default_factory=list)
    """The tokens of each part so far."""
    _before: list[Array | None] = dataclasses.field(default_factory=list)
    _left: list[Array] = dataclasses.field(default_factory=list)

    def convolve(self, layer: ShortConvolution, x: Array) -> Array:
        """The next short convolution of the layer."""
        return self.run(layer.convolution, {"x": x}, {"weight": layer.weight[:, 0], "bias": layer.bias})

    def run(
        self, operation: Any, tokens: dict[str, Array], parameters: dict[str, Any] | None = None
    ) -> Array:
        """`operation` over `tokens` (arrays with an axis of time), with `parameters` that have none, from the next state."""
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

    def left_by(self, batch: RaggedBatch) -> RecurrentState:
        """What is kept of the sequences of a batch: `left`, but of new tokens that may be taken back the state before them, and they."""
        if self.state is None or self.state.drafts is None:
            return self.left
        few = new_tokens(batch) <= self.state.drafts.num_tokens
        pairs = zip(self._before, self._left, strict=True)
        parts = [
            jnp.where(like_rows(few, new), old, new.astype(old.dtype))
            for old, new in pairs
            if old is not None
        ]
        return RecurrentState(tuple(parts[:-1]), parts[-1], self.state.drafts.renewed(self.given, batch))
