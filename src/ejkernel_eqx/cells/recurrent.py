"""`Recurrent`: LSTM, GRU and plain recurrent networks over time."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..core.arguments import array, check_flags, check_state_dtype
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import Call, check_options, Parameters, resolve, Tokens
from .core import KINDS
from .spec import CellSpec

GivenState = Float[AnyArray, "... H"] | tuple[Float[AnyArray, "... H"], Float[AnyArray, "... H"]]
NewState = Float[Array, "... H"] | tuple[Float[Array, "... H"], Float[Array, "... H"]]


class Recurrent(Kernel):
    r"""An LSTM, a GRU or a plain recurrent network over time, in the formulas and gate order of PyTorch and cuDNN.

    With $x_t$ = `weight_ih` $u_t$ + `bias_ih` for inputs $u_t$, rows $W$ of `weight_hh` and parts $b$ of `bias_hh`:

    LSTM, gates $i, f, g, o$:

    $$i, f, o = \sigma(x_t + W h_{t-1} + b), \quad g = \phi(x_{tg} + W_g h_{t-1} + b_g), \quad
      c_t = f \odot c_{t-1} + i \odot g, \quad h_t = o \odot \phi(c_t)$$

    GRU, gates $r, z, n$:

    $$r, z = \sigma(x_t + W h_{t-1} + b), \quad n = \phi(x_{tn} + r \odot (W_n h_{t-1} + b_n)), \quad
      h_t = (1 - z) \odot n + z \odot h_{t-1}$$

    RNN: $h_t = \phi(x_t + W h_{t-1} + b)$.

    $\phi$ is `activation` and $\sigma$ `gate_activation`. The inputs of all tokens are projected by one product; without `weight_ih` they are given
    projected. Products are in the dtype of the inputs with float32 sums; states are float32 (float64 for float64). The backward keeps the states of
    every token and recomputes the gates.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in every float argument and through all
    results; `platform="xla"` also supports forward mode and second derivatives.

    Sources: Hochreiter & Schmidhuber, *Long Short-Term Memory* (1997); Gers, Schmidhuber & Cummins, *Learning to Forget* (2000); Cho et al.,
    *Learning Phrase Representations using RNN Encoder-Decoder* (2014), with the reset gate after the product as in cuDNN; Elman, *Finding
    Structure in Time* (1990).
    """

    operation: ClassVar[str] = "recurrent"

    cell: str = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    gate_activation: str = eqx.field(static=True)
    reverse: bool = eqx.field(static=True)
    state_dtype: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        cell: str = "lstm",
        *,
        activation: str = "tanh",
        gate_activation: str = "sigmoid",
        reverse: bool = False,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `cell`: `"lstm"`, `"gru"` or `"rnn"`.
        - `activation`: of candidates and of the LSTM's output: `"tanh"`, `"relu"`, `"sigmoid"`, `"hard_tanh"`, `"silu"` or `"identity"`.
        - `gate_activation`: of the other gates: `"sigmoid"` or `"hard_sigmoid"`.
        - `reverse`: process the tokens of each sequence from last to first. The initial state then enters the last token, and the final state is
            the one after the first.
        - `state_dtype`: of the states: float32 (the default, float64 for float64), or bfloat16 for storage.
        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this kernel configuration, which implies its platform.
        - `tune_for`: `(inputs, weight_hh)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these
            inputs now.
        """
        check_options(cell, activation, gate_activation)
        check_flags(reverse=reverse)
        self.cell, self.activation, self.gate_activation = cell, activation, gate_activation
        self.reverse = bool(reverse)
        self.state_dtype = check_state_dtype(state_dtype)
        self.plan = plan_of(Recurrent, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.Recurrent")
    def __call__(
        self,
        inputs: Float[AnyArray, "*B T I"],
        weight_hh: Float[AnyArray, "G H"],
        bias_hh: Float[AnyArray, " G"] | None = None,
        *,
        weight_ih: Float[AnyArray, "G I"] | None = None,
        bias_ih: Float[AnyArray, " G"] | None = None,
        initial_state: GivenState | None = None,
        lengths: Int[Numbers, "*B"] | None = None,
        resets: Bool[Numbers, "*B T"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T H"], NewState]:
        """`G` is the number of gates times `H`: `4 H` for an LSTM, `3 H` for a GRU, `H` for an RNN.

        **Arguments:**

        - `inputs`: `[..., T, I]` with any number of leading axes; bf16, f16, f32 (f64 on XLA). Without `weight_ih` they are already projected,
            `[..., T, G]`.
        - `weight_hh`, `weight_ih`: `[G, H]` and `[G, I]`, any float dtype; they are cast to that of the inputs.
        - `bias_hh`, `bias_ih`: `[G]`, any float dtype.
        - `initial_state`: `(hidden, cell)` of an LSTM, otherwise one array. Each is `[..., H]`, or `[N, H]` with
            `cu_seqlens`. The default is zero.
        - `lengths`: ints `[...]` from 0 to `T`, the number of tokens of each row; those behind are padding. Not with `cu_seqlens`.
        - `resets`: bool `[..., T]`. A new sequence starts at these tokens, from a state of zeros. At the first token,
            that replaces the initial state. Not with `cu_seqlens`.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes); tokens outside are padding.
        - `segment_ids`: `[..., T]`. A new segment starts where the id changes, from a state of zeros. The initial state
            enters the row's first segment. The final state is that of the last. Negative ids are padding, anywhere.
        - `state_indices`: ints `[B]` (`[N]` with `cu_seqlens`): `initial_state` is a pool `[slots, H]`, and each row (or packed sequence) reads
            and writes its slot. -1 starts from zeros and writes nothing. Slots must be distinct.

        **Returns:** `(out, final_state)`: the hidden states `[..., T, H]` in the dtype of `inputs`, 0 at padding; and the state after the last token,
        in the form of `initial_state` (the whole pool with `state_indices`). Padding leaves states unchanged, and what it holds reaches nothing.

        **Raises:** `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        parameters = Parameters(weight_hh, bias_hh, weight_ih, bias_ih)
        tokens = Tokens(lengths, resets, cu_seqlens, segment_ids, state_indices)
        return self._run(inputs, parameters, initial_state, tokens, self.reverse)

    @jax.named_scope("ejkernel_eqx.Recurrent.step")
    def step(
        self,
        inputs: Float[AnyArray, "*B I"],
        weight_hh: Float[AnyArray, "G H"],
        bias_hh: Float[AnyArray, " G"] | None,
        state: GivenState,
        *,
        weight_ih: Float[AnyArray, "G I"] | None = None,
        bias_ih: Float[AnyArray, " G"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B H"], NewState]:
        """Processes one token per row, for decoding: a call with `T = 1`, forward in time.

        **Arguments:**

        - `inputs`: `[..., I]`, or projected `[..., G]`. Parameters as in a call.
        - `state`: as `initial_state` of a call; with `state_indices` a pool, updated in place if donated.
        - `state_indices`: ints `[B]`, the slot of each row of `inputs [B, I]`; for -1 the output is 0 and nothing is written.

        **Returns:** `(out, state)`: `[..., H]` in the dtype of `inputs`, and the new state (with `state_indices`, the whole pool).
        """
        inputs = array("inputs", inputs, "I")
        # [*, I] to [*, 1, I]: a step is a call of one token.
        row = jnp.expand_dims(inputs, inputs.ndim - 1)
        parameters = Parameters(weight_hh, bias_hh, weight_ih, bias_ih)
        tokens = Tokens(state_indices=state_indices)
        out, new = self._run(row, parameters, state, tokens, False)
        out = jnp.squeeze(out, -2)
        if state_indices is None:
            return out, new
        used = jnp.asarray(state_indices) >= 0
        return jnp.where(used[:, None], out, jnp.zeros((), out.dtype)), new

    def _run(
        self, inputs: Any, parameters: Parameters, initial_state: Any, tokens: Tokens, reverse: bool
    ) -> tuple[Array, Any]:
        main = array("inputs", inputs, "T I")
        state_dtype = self.state_dtype or ("float64" if main.dtype == jnp.float64 else "float32")
        gates = "sigmoid" if self.cell == "rnn" else self.gate_activation
        spec = CellSpec(self.cell, self.activation, gates, state_dtype)
        call: Call = resolve(spec, main, parameters, initial_state, tokens, reverse=reverse)
        if call.frame.is_empty:  # nothing to launch; states are unchanged
            return call.finish(call.unchanged(spec))
        return call.finish(KINDS[self.cell].call(self.plan, self.operation, call.arrays, spec))
