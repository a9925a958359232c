from .dense import Matmul as Matmul
from .dense import QuantizedMatmul as QuantizedMatmul
from .float8 import Float8Weight as Float8Weight
from .float8 import ScaledMatmul as ScaledMatmul
from .grouped import GroupedMatmul as GroupedMatmul
