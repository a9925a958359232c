"""`GatedShortConvolution`: the layer of LFM2 without attention."""

from typing import Any

import equinox as eqx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..convolution import CausalConv1d
from ..dispatch import PlatformLike
from ..weights.recurrent_configs import gated_short_convolution_options
from .arguments import checked
from .parts import Parts
from .projection import project, project_parts
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution


class GatedShortConvolution(RecurrentLayer):
    r"""A short convolution between two gates:

    $$[B, C, x] = u W_{in}^\top, \qquad y = \big(C \odot \mathrm{conv}(B \odot x)\big) W_{out}^\top$$

    The state is the last $W - 1$ inputs of the convolution, in the `recurrent` of a [`RecurrentState`][ejkernel_eqx.nn.RecurrentState]. The
    underlying operation is [`ejkernel_eqx.CausalConv1d`][].

    Source: Liquid AI, *LFM2 Technical Report* (2025), section 2; the published model code.
    """

    in_proj: eqx.nn.Linear  # [3 * E, E]: B, C, x
    conv: ShortConvolution  # [E, 1, W]
    out_proj: eqx.nn.Linear  # [E, E]
    embed_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(gated_short_convolution_options)

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        conv_width: int = 3,
        use_bias: bool = False,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer] but for `norm_eps` and `state_dtype`, and

        - `conv_width`: kernel size of the convolution, `W`.
        - `use_bias`: whether the convolution, `in_proj` and `out_proj` have biases.
        """
        parts = Parts(key, 3, dtype, compute_dtype, platform, sequence_axis)
        self.in_proj = parts.linear(embed_dim, 3 * embed_dim, use_bias)
        self.conv = parts.convolution(embed_dim, conv_width, use_bias, activation=None, config=config)
        self.out_proj = parts.linear(embed_dim, embed_dim, use_bias)
        self.embed_dim, self.compute_dtype = embed_dim, parts.compute_dtype

    @property
    def recurrence(self) -> CausalConv1d:
        return self.conv.convolution

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        return (), (self.conv.width - 1, self.embed_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        B, C, x = project_parts("in_proj", self.in_proj, x, (self.embed_dim,) * 3)
        return project("out_proj", self.out_proj, C * rows.convolve(self.conv, B * x), self.embed_dim)
