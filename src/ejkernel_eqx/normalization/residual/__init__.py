from .operation import ResidualRMSNorm as ResidualRMSNorm
