from .operation import Matmul as Matmul
