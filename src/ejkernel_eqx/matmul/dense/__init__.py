from .operation import Matmul as Matmul
from .operation import QuantizedMatmul as QuantizedMatmul
