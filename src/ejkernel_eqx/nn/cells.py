"""`LSTM`, `GRU` and `RNN`: PyTorch's recurrent layers."""

from typing import Any, ClassVar, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..dispatch import PlatformLike
from ..weights.fill import replaced
from .cell_layer import CellLayer


class LSTM(CellLayer):
    r"""Long short-term memory, as `torch.nn.LSTM` with `batch_first=True`. For each layer, with gates $i, f, g, o$ in this order:

    $$[i, f, g, o] = x_t W_{ih}^\top + b_{ih} + h_{t-1} W_{hh}^\top + b_{hh}$$
    $$c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \qquad h_t = \sigma(o) \odot \tanh(c_t)$$

    The underlying operation is [`ejkernel_eqx.Recurrent`][]. Source: Hochreiter & Schmidhuber, *Long Short-Term Memory* (1997).
    """

    _cell: ClassVar[str] = "lstm"
    if TYPE_CHECKING:  # or type checkers take the fields for its arguments
        __init__ = CellLayer.__init__

    @classmethod
    def from_equinox(cls, cell: eqx.nn.LSTMCell, *, platform: PlatformLike | None = None) -> "LSTM":
        """Converts an `equinox.nn.LSTMCell`: the layer computes what a scan of the cell over time does. Equinox has one bias, which becomes
        `bias_ih`; `bias_hh` is zero. The states `(h, c)` of the cell are the `hidden` and `cell` of the layer's, without its axis of layers."""
        return _converted(cls, cell, eqx.nn.LSTMCell, None, platform)


class GRU(CellLayer):
    r"""Gated recurrent units, as `torch.nn.GRU` with `batch_first=True`: with gates $r, z, n$ in this order,

    $$r, z = \sigma(x_t W_{ih}^\top + b_{ih} + h_{t-1} W_{hh}^\top + b_{hh}), \qquad
      n = \tanh(x_t W_{in}^\top + b_{in} + r \odot (h_{t-1} W_{hn}^\top + b_{hn}))$$
    $$h_t = (1 - z) \odot n + z \odot h_{t-1}$$

    The underlying operation is [`ejkernel_eqx.Recurrent`][]. Source: Cho et al., *Learning Phrase Representations using RNN Encoder-Decoder*
    (2014), with the reset gate after the product, as in cuDNN.
    """

    _cell: ClassVar[str] = "gru"
    if TYPE_CHECKING:  # or type checkers take the fields for its arguments
        __init__ = CellLayer.__init__

    @classmethod
    def from_equinox(cls, cell: eqx.nn.GRUCell, *, platform: PlatformLike | None = None) -> "GRU":
        """Converts an `equinox.nn.GRUCell`: the layer computes what a scan of the cell over time does. The cell's `bias` becomes `bias_ih`, and
        its `bias_n` the last part of `bias_hh`, whose rest is zero."""
        return _converted(cls, cell, eqx.nn.GRUCell, "bias_n", platform)


class RNN(CellLayer):
    r"""A plain recurrent network, as `torch.nn.RNN` with `batch_first=True`; `activation` is PyTorch's `nonlinearity`:

    $$h_t = \phi(x_t W_{ih}^\top + b_{ih} + h_{t-1} W_{hh}^\top + b_{hh})$$

    The underlying operation is [`ejkernel_eqx.Recurrent`][]. Source: Elman, *Finding Structure in Time* (1990).
    """

    _cell: ClassVar[str] = "rnn"
    if TYPE_CHECKING:  # or type checkers take the fields for its arguments
        __init__ = CellLayer.__init__


def _converted(cls: Any, cell: Any, kind: Any, inner: str | None, platform: PlatformLike | None) -> Any:
    """A layer with the weights of a cell of Equinox, of which `inner` is the bias inside the product with r."""
    if not isinstance(cell, kind):
        raise ValueError(
            f"cell: expected an equinox.nn.{kind.__name__}, received {type(cell).__name__}; build other layers from their sizes."
        )
    options: Any = {"use_bias": cell.use_bias, "platform": platform, "dtype": cell.weight_ih.dtype}
    layer = cls(cell.input_size, cell.hidden_size, **options, key=jax.random.key(0))
    new: dict[str, Array] = {"weight_ih_l0": cell.weight_ih, "weight_hh_l0": cell.weight_hh}
    if cell.use_bias:
        other = jnp.zeros_like(cell.bias)
        if inner is not None:
            other = other.at[-cell.hidden_size :].set(getattr(cell, inner))
        new |= {"bias_ih_l0": cell.bias, "bias_hh_l0": other}
    return replaced(layer, {"weights": new})
