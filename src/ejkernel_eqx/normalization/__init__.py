from .gated import GatedRMSNorm as GatedRMSNorm
from .residual import ResidualRMSNorm as ResidualRMSNorm
