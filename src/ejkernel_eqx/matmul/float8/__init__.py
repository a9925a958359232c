from .operation import ScaledMatmul as ScaledMatmul
from .training import Float8Weight as Float8Weight
