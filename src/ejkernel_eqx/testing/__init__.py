"""The interpreter of Triton kernels on a CPU, with which kernels are tested: the platform `triton-interpret`.

`launch` imports this package when the first kernel is interpreted, and not before."""

from .interpret import InterpretError as InterpretError
from .interpret import poison as poison
