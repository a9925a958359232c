from .gated_delta import DeltaRule as DeltaRule
from .gated_delta import GatedDeltaRule as GatedDeltaRule
from .gated_linear import GatedLinearAttention as GatedLinearAttention
from .kernel_delta import KernelDeltaAttention as KernelDeltaAttention
from .lightning import lightning_slopes as lightning_slopes
from .lightning import LightningAttention as LightningAttention
from .linear import LinearAttention as LinearAttention
from .state_space_v2 import StateSpaceV2 as StateSpaceV2
