from .dense import Matmul as Matmul
from .grouped import GroupedMatmul as GroupedMatmul
