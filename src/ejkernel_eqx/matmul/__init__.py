from .dense import Matmul as Matmul
from .dense import QuantizedMatmul as QuantizedMatmul
from .grouped import GroupedMatmul as GroupedMatmul
