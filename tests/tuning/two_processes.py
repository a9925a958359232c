"""One of the two processes of a test: `python -m tests.tuning.two_processes PORT RANK FILE`. What came of each scenario is in FILE."""

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
PORT, RANK, FILE = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import ejkernel_eqx as ejx  # noqa: E402
from ejkernel_eqx import Platform  # noqa: E402
from tests.tuning.parts import device_facts, invocations_of, Known, memory_cache, processes, tuner, user_cache  # noqa: E402
from tests.tuning.scaling import OPERATION, problem_of, QUICK, Scale, ScaleConfig  # noqa: E402

X = jax.ShapeDtypeStruct((8,), jnp.float32)
KEY = problem_of(X).key()


def sharded_step(model: Any) -> list[float]:
    """What one step of a model, compiled over the devices of both processes, gives."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    whole = np.arange(32, dtype=np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])

    def local(x):
        return jax.lax.ppermute(model(x), "x", [(i, (i + 1) % 4) for i in range(4)])

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    return [float(value) for shard in step(x).addressable_shards for value in np.ravel(shard.data)]


def chosen(model: Any, x: Any = X) -> list[Any]:
    return [[call.config.block, call.tier.value] for call in invocations_of(model, ejx.inputs(x))]


def entries() -> int:
    return len(user_cache(device_facts(), OPERATION))


def table() -> list[Any]:
    return sorted(
        [platform.value, key, known.config.block] for (platform, key), known in memory_cache.items()
    )


def skewed() -> Any:
    # Only this process knows this; it must not make the plans differ.
    memory_cache.put(Platform.XLA, problem_of(jnp.ones(2**9)).key(), ScaleConfig(10 + RANK))
    model = ejx.tune(eqx.nn.Sequential([Scale(), Scale()]), X, options=QUICK)
    return {"chosen": chosen(model), "table": table(), "step": sharded_step(model), "entries": entries()}


def process_0_fails() -> Any:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ejx.TuningError("the device is on fire")

    original = tuner.tune_problem
    tuner.tune_problem = broken if RANK == 0 else original
    try:
        return ejx.tune(Scale(), X, options=QUICK)
    finally:
        tuner.tune_problem = original


def process_1_fails() -> Any:
    def call(model: Any, x: Any) -> Any:
        if RANK == 1:
            raise RuntimeError("a file is missing here")
        return model(x)

    return ejx.tune(Scale(), X, call=call, options=QUICK)


def different_problems() -> Any:
    return ejx.tune(Scale(), jax.ShapeDtypeStruct((8 << RANK,), jnp.float32), options=QUICK)


def different_policies() -> Any:
    with ejx.policy_override("tune" if RANK else "cached"):
        return ejx.tune(Scale(), X, options=QUICK)


def a_kernel_that_others_do_not_have() -> Any:
    captured = Scale(config=ScaleConfig(3 + RANK))
    return ejx.tune(Scale(), X, call=lambda model, x: model(captured(x)), options=QUICK)


def what_arrives_is_changed() -> Any:
    """Process 1 takes another table than was sent: as after a mistake in reading it."""

    def changed(table: Any, operations: Any) -> None:
        install({place: Known(ScaleConfig(7)) for place in table} if RANK else table, operations)

    install, processes._install = processes._install, changed
    try:
        return ejx.tune(Scale(), X, options=QUICK)
    finally:
        processes._install = install


def process_1_stays_away() -> Any:
    processes.PATIENCE = 2.0
    return None if RANK else ejx.tune(Scale(), X, options=QUICK)


def replanned() -> Any:
    """Each process has its own table; all take that of process 0."""
    os.environ["EJKERNEL_EQX_CACHE_DIR"] += f"/of_{RANK}"
    if RANK == 0:
        tune_alone()
    before = chosen(Scale())
    (call,) = invocations_of(Scale(), ejx.inputs(X))
    assert tuner.autotune_tier(call.problem, call.implementation, device_facts()) is None
    model = ejx.replan(Scale())
    return {"before": before, "chosen": chosen(model), "table": table()}


def tune_alone() -> None:
    """Fills this process's table, as a process that runs alone does, and forgets it."""
    (call,) = invocations_of(Scale(), ejx.inputs(X))
    tuner.tune_problem(call.problem, call.implementation, options=QUICK)
    memory_cache.clear()


def recorded() -> Any:
    ejx.record_invocation(Scale(), X)
    (call,) = ejx.autotune_recorded(options=QUICK)
    return {"chosen": [[call.config.block, call.tier.value]], "table": table()}


SCENARIOS = (
    skewed,
    replanned,
    recorded,
    process_0_fails,
    process_1_fails,
    different_problems,
    different_policies,
    a_kernel_that_others_do_not_have,
    what_arrives_is_changed,
    process_1_stays_away,
)


def ended(scenario: Callable[[], Any]) -> dict[str, Any]:
    """The result of a scenario that begins with no table, or its error."""
    memory_cache.clear()
    os.environ["EJKERNEL_EQX_CACHE_DIR"] = f"{FILE.parent}/{scenario.__name__}"
    try:
        result = scenario()
    except (ejx.TuningError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}", "result": None}
    return {"error": None, "result": result if isinstance(result, dict) else None}


def main() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=RANK)
    assert jax.process_count() == 2
    FILE.write_text(json.dumps({scenario.__name__: ended(scenario) for scenario in SCENARIOS}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
