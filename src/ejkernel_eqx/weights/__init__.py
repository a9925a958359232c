"""Published weights: reads arrays from files, splits and renames them, and fills the layers of this package. Nothing may be missing or left over."""

from .attention_configs import attention_options as attention_options
from .configs import unit_offset_norms as unit_offset_norms
from .load import load_published as load_published
from .recurrent_configs import gated_delta_net_options as gated_delta_net_options
from .recurrent_configs import gated_linear_attention_options as gated_linear_attention_options
from .recurrent_configs import gated_short_convolution_options as gated_short_convolution_options
from .recurrent_configs import kimi_delta_attention_options as kimi_delta_attention_options
from .recurrent_configs import lightning_attention_options as lightning_attention_options
from .recurrent_configs import mamba1_options as mamba1_options
from .recurrent_configs import mamba2_options as mamba2_options
from .view import Weights as Weights
