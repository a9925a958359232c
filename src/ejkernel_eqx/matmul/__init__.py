from .dense import Matmul as Matmul
from .dense import QuantizedMatmul as QuantizedMatmul
from .float8 import ScaledMatmul as ScaledMatmul
from .grouped import GroupedMatmul as GroupedMatmul
