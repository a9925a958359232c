"""Inner parts that tests of this room look into: the one place where they are named."""
# ruff: noqa: F401

from ejkernel_eqx._kernel import make_plan, settle
from ejkernel_eqx._tolerances import errors, Tolerance, TOLERANCES
from ejkernel_eqx.attention.xla import default_config
from ejkernel_eqx.dispatch import (
    BOTH,
    current_policy,
    Denied,
    device_facts,
    FORWARD,
    Implementation,
    Known,
    lookup,
    memory_cache,
    no_tuning,
    Part,
    Policy,
    store,
    Tier,
    Timed,
    tuning_allowed,
    user_cache,
    Workload,
)
from ejkernel_eqx.dispatch.labels import kernel_scope
from ejkernel_eqx.launch import compile_ahead, target_for, TARGETS
from ejkernel_eqx.launch._language_lock import LanguageLock
from ejkernel_eqx.tuning import carried, ledger, lock, measure, processes, trials, tuner
from ejkernel_eqx.tuning.bench import Bench
from ejkernel_eqx.tuning.check import all_errors, result_errors, same_bits
from ejkernel_eqx.tuning.filters import refusal
from ejkernel_eqx.tuning.isolated import isolation
from ejkernel_eqx.tuning.isolated.events import Begun, Ended, Failed, Finished, Job, Measured, Stage, Unsound
from ejkernel_eqx.tuning.ledger import Ledger
from ejkernel_eqx.tuning.recording import invocations_of
from ejkernel_eqx.tuning.replace import plans_of
from ejkernel_eqx.tuning.report import data, document, plot
from ejkernel_eqx.tuning.report.data import entry_of_result, LOST
from ejkernel_eqx.tuning.result import Candidate, Measurement, record_for
from ejkernel_eqx.tuning.roofline import Peaks
