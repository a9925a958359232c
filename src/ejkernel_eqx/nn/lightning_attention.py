"""The lightning attention layer of MiniMax-01."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..recurrence import lightning_slopes
from ..recurrence import LightningAttention as Operation
from ..core.arguments import accumulator
from .arguments import check_eps, check_key, check_sizes, is_known, read_array, read_dtype
from .attention_inputs import head_dim_of
from .compute import read_compute_dtype
from .gated_rms_norm import GatedRMSNorm
from .projection import project
from .recurrent import merge_heads, RecurrentLayer, RecurrentState, Rows, split_heads, StateForm


class LightningAttention(RecurrentLayer):
    r"""Lightning attention with weights: linear attention whose heads forget at constant rates, normalised over all
    heads, then gated.

    $$[q, k, v]_h = \mathrm{silu}(x W_{qkv}^\top)_h, \qquad o = \mathrm{Lightning}(q, k, v), \qquad
      y = \big(\sigma(x W_g^\top) \odot \mathrm{norm}(o)\big) W_o^\top$$

    with the slopes `"minimax"` of [`ejkernel_eqx.lightning_slopes`][], which depend on the layer's place in its model. The
    place is an array, not a parameter: stacked layers have each their own. The operation inside is
    [`ejkernel_eqx.LightningAttention`][]. The parameters have the names and shapes of the published model code; the guide
    "Recurrent layers" has the calls and the table of names.

    Source: MiniMax, *MiniMax-01: Scaling Foundation Models with Lightning Attention* (2025), section 2.2.
    """

    qkv_proj: eqx.nn.Linear  # [3 * H * D, E]: each head's query, key, value
    norm: GatedRMSNorm  # [H * D]
    output_gate: eqx.nn.Linear  # [H * D, E]
    out_proj: eqx.nn.Linear  # [E, H * D]
    layer_index: Array  # int32 []
    recurrence: Operation
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        head_dim: int | None = None,
        layer_index: int | Array = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-6,
        state_dtype: DTypeLike | None = None,
        platform: str | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        """**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `num_heads`, `head_dim`: `H` and `D`; default of the latter `embed_dim // num_heads`.
        - `layer_index`, `num_layers`: the place of the layer in its model, from 0, and how many layers of any kind that has.
            The place may be a traced integer, under `equinox.filter_vmap`.
        - `norm_eps`: what is added to the mean square.
        - `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.LightningAttention`][]; the platform is the norm's as well.
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
            what the two promote to.
        - `key`: a PRNG key for the initial weights.
        """
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_layers=num_layers)
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        check_sizes(head_dim=head_dim)
        check_eps(norm_eps=norm_eps)
        check_key(key)
        dtype, compute_dtype = read_dtype("dtype", dtype), read_compute_dtype(compute_dtype)
        _check_place(layer_index, num_heads, num_layers)
        width = num_heads * head_dim
        qkv_key, gate_key, out_key = jax.random.split(key, 3)
        self.qkv_proj = eqx.nn.Linear(embed_dim, 3 * width, False, dtype, key=qkv_key)
        self.norm = GatedRMSNorm(
            width, activation="sigmoid", norm_before_gate=True, eps=norm_eps, platform=platform, dtype=dtype
        )
        self.output_gate = eqx.nn.Linear(embed_dim, width, False, dtype, key=gate_key)
        self.out_proj = eqx.nn.Linear(width, embed_dim, False, dtype, key=out_key)
        self.layer_index = jnp.asarray(layer_index, jnp.int32)
        self.recurrence = Operation(
            slopes=None, scale=1.0, state_dtype=state_dtype, platform=platform, config=config
        )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.num_layers = num_layers
        self.compute_dtype = compute_dtype

    def _projections(self) -> tuple[Any, ...]:
        return self.qkv_proj, self.output_gate, self.out_proj

    def slopes(self) -> Array:
        """The slopes of the heads, `[H]`, in float32 (float64 for float64)."""
        # From those of all layers in double precision: in single, the late layers', which are nearly zero, would be coarse.
        layers = range(self.num_layers)
        table = [lightning_slopes("minimax", self.num_heads, i, self.num_layers) for i in layers]
        return jnp.asarray(np.stack(table), accumulator(self._stored_dtype()))[self.layer_index]

    def _state_form(self) -> StateForm:
        return StateForm((), (self.num_heads, self.head_dim, self.head_dim))

    def _mix(self, x: Array, rows: Rows) -> tuple[Array, RecurrentState]:
        width = self.num_heads * self.head_dim
        qkv = split_heads(jax.nn.silu(project("qkv_proj", self.qkv_proj, x, 3 * width)), self.num_heads)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        out, recurrent = rows.recur(self.recurrence, {"q": q, "k": k, "v": v}, {"slopes": self.slopes()})
        y = self.norm(merge_heads(out), project("output_gate", self.output_gate, x, width))
        return project("out_proj", self.out_proj, y, self.embed_dim), RecurrentState((), recurrent)


def _check_place(layer_index: Any, num_heads: int, num_layers: int) -> None:
    """A place in a model, an integer or an array of one; refused where it is known and no layer's."""
    if isinstance(layer_index, bool) or not isinstance(layer_index, int | np.integer):
        layer_index = read_array("layer_index", layer_index, "integers", "[]")
        if layer_index.ndim:
            raise ValueError(
                f"layer_index: expected one integer, received shape {layer_index.shape}; equinox.filter_vmap builds stacked layers."
            )
    if is_known(layer_index):
        lightning_slopes("minimax", num_heads, int(layer_index), num_layers)
