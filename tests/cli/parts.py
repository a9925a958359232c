"""Inner parts that tests of this room look into: the one place where they are named."""
# ruff: noqa: F401

from ejkernel_eqx._tolerances import TOLERANCES
from ejkernel_eqx.cli import bench, doctor, output, problems
from ejkernel_eqx.cli.main import main
from ejkernel_eqx.dispatch import (
    BOTH,
    Denied,
    device_facts,
    FORWARD,
    Implementation,
    lookup,
    memory_cache,
    Record,
    software,
    Timed,
    user_cache,
    Workload,
)
from ejkernel_eqx.dispatch.environment import EnvironmentVariable
from ejkernel_eqx.dispatch.overlay import POLICY_VARIABLE
from ejkernel_eqx.dispatch.persistent import CACHE_DIR
from ejkernel_eqx.tuning import ledger
