"""Measuring, checking and choosing configurations."""

from .measure import benchmark as benchmark
from .measure import Timing as Timing
from .options import TuneOptions as TuneOptions
from .options import tuning_options as tuning_options
from .result import Measurement as Measurement
from .result import Status as Status
from .result import TuningResult as TuningResult
from .tracing import inside_trace as inside_trace
from .tuner import autotune_tier as autotune_tier
from .tuner import tune_problem as tune_problem
from .tuner import tuned_results as tuned_results
