"""The one bridge to Triton: launching a kernel, interpreting it on a CPU, compiling it ahead of time.

Importing this package needs neither Triton nor jax-triton."""

from ._run import run as run
from .compile import (
    compile_ahead as compile_ahead,
    CompileReport as CompileReport,
    Target as Target,
    TARGETS as TARGETS,
)
from .interpret import InterpretError as InterpretError, interpreter_unavailable as interpreter_unavailable
from .interpret import poison as poison
from .launch import Launch as Launch
from .triton_call import triton_unavailable as triton_unavailable
