"""Triton kernels on a CPU, by interpretation: the platform `triton-interpret`."""

from .interpret import interpret_call as interpret_call
from .interpret import InterpretError as InterpretError
from .interpret import poison as poison
