from .gated import GatedRMSNorm as GatedRMSNorm
