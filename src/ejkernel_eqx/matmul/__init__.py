from .dense import Matmul as Matmul
from .float8 import ScaledMatmul as ScaledMatmul
from .grouped import GroupedMatmul as GroupedMatmul
