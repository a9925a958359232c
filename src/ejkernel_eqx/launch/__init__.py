"""The bridge to Triton: launching a kernel, compiling it ahead of time. `testing` interprets it on a CPU.

Submodules beyond the names exported here: `fields` for configurations that validate themselves; `sizes` for tiles and grids; `activations`
and `constants` for kernel bodies.

Importing this package needs neither Triton nor jax-triton."""

from ._while_used import collector_paused as collector_paused
from .by_name import executing as executing
from .by_name import given as given
from .by_name import Launcher as Launcher
from .by_name import LOG2E as LOG2E
from .by_name import NOTHING as NOTHING
from .by_name import Options as Options
from .by_name import result as result
from .by_name import result_like as result_like
from .by_name import run as run
from .compile import compile_ahead as compile_ahead
from .compile import CompileReport as CompileReport
from .compile import interpreter_unavailable as interpreter_unavailable
from .compile import Target as Target
from .compile import target_for as target_for
from .compile import TARGETS as TARGETS
from .launch import Launch as Launch
from .own_call import expect_launches as expect_launches
from .own_call import gluon_unavailable as gluon_unavailable
from .triton_call import limits_registers as limits_registers
from .triton_call import register_limits_measured as register_limits_measured
from .triton_call import triton_unavailable as triton_unavailable
