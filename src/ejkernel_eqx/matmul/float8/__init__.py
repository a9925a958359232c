from .operation import ScaledMatmul as ScaledMatmul
