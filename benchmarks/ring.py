"""RingAttention over the GPUs of a host, compared with FlashAttention on one and with what XLA makes of `jax.nn`'s attention on split tokens.

    python -m benchmarks ring --json ring.json --profile trace           # needs two GPUs or more: everything
    python -m benchmarks ring --tokens 32768 --variants flash,zigzag --profile trace
    python -m benchmarks ring --devices 8 --json ring_h200_x8.json       # 65,536 and 131,072 tokens, and 524,288 on all
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m benchmarks ring --quick

Forward and backward of causal attention. Results of a short sequence are first compared with FlashAttention on one device. Then calls are
timed in turn. `speedup` is the time of one device over this one's; `memory` is what one device needs, arguments and results included.
`--profile` writes a trace of one call of each variant; `hidden` is the part of the time of sending in which the same GPU computes.

Last come the goals: how fast the best form is, for each length, and whether a row that is longer by the number of devices takes as much memory of
each as one device needs alone: a row of 131,072 tokens for two devices, of 65,536 for more. Off GPUs they are shown, but none is missed.
"""

import argparse
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from benchmarks import measure as traces
from benchmarks import report

AXIS = "sequence"
VARIANTS = ("flash", "zigzag", "contiguous", "all_to_all", "jax.nn")
GOALS = {131072: 1.8, 32768: 1.7}
"""Speed of two GPUs over one that is wanted, by the number of tokens."""
SHARES = {131072: 0.88}
"""Of the number of more GPUs, the speed of so many over one."""
OURS = ("zigzag", "contiguous", "all_to_all")
_ALLOWED = 0.03  # relative error of bfloat16
_MEMORY = 1.1  # of one device's


def operation(name: str, platform: Any) -> Callable[..., Any]:
    """Causal attention `(q, k, v) -> out`."""
    if name == "flash":
        return ejx.FlashAttention(causal=True, platform=platform)
    if name == "jax.nn":
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    order: Any = "zigzag" if name == "zigzag" else "contiguous"
    method: Any = "all_to_all" if name == "all_to_all" else "ring"
    return ejx.RingAttention(AXIS, causal=True, order=order, method=method, platform=platform)


def gradient(name: str, options: argparse.Namespace) -> Callable[..., Any]:
    """Forward and backward: `(q, k, v, dout) -> (out, gradients)`."""
    call = operation(name, options.platform)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(dout)

    return jax.jit(both)


def layout(name: str, options: argparse.Namespace) -> Any:
    """One device, or tokens over all. `jax.nn` is called on an automatic mesh, where XLA may split it as it likes."""
    if name == "flash":
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    axis_type = AxisType.Auto if name == "jax.nn" else AxisType.Explicit
    return NamedSharding(jax.make_mesh((options.devices,), (AXIS,), axis_types=(axis_type,)), P(None, AXIS))


def inputs(name: str, tokens: int, options: argparse.Namespace) -> list[Any]:
    """Made on the host, in the order of tokens that the variant takes."""
    random, made = np.random.default_rng(0), []
    for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads):
        x = random.standard_normal((1, tokens, heads, options.head_dim), np.float32)
        x = x.astype(jnp.dtype(options.dtype))
        if name == "zigzag":
            x = np.asarray(ejx.sequences.reorder_sequence(x, options.devices, axis=1))
        made.append(jax.device_put(x, layout(name, options)))
    return made


def worst_error(name: str, options: argparse.Namespace) -> float:
    """The largest relative error of the output and the gradients of a short sequence."""

    def results(name: str) -> list[np.ndarray]:
        result = jax.device_get(gradient(name, options)(*inputs(name, options.check, options)))
        restore = lambda x: ejx.sequences.restore_sequence(x, options.devices, axis=1)
        arrays = map(restore if name == "zigzag" else lambda x: x, jax.tree.leaves(result))
        return [np.asarray(x).astype(np.float32) for x in arrays]

    pairs = zip(results(name), results("flash"), strict=True)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


def measure(name: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    devices = 1 if name == "flash" else options.devices
    row: dict[str, Any] = {"variant": name, "tokens": tokens, "devices": devices}
    try:
        row["error"] = worst_error(name, options)
        if not row["error"] <= _ALLOWED:
            return row | {"reason": f"wrong: relative error {row['error']:.2g}"}
        arrays = inputs(name, tokens, options)
        program = gradient(name, options).lower(*arrays).compile()
        row["memory_bytes"] = report.bytes_of(program.memory_analysis())
        sample = functools.partial(traces.host_ms, lambda: program(*arrays))
        sample(2)
        samples = [sample(options.calls) for _ in range(options.samples)]
        if options.profile:
            spans = traces.traced(lambda: sample(1), options.profile / f"{name}-{tokens}")
            row["hidden"] = traces.hidden(spans)
    except (RuntimeError, ValueError) as error:  # out of memory, among others
        return row | {"reason": str(error).splitlines()[0][:160]}
    # Two products forward and five backward, over half of the scores.
    flops = 3.5 * 2 * tokens * tokens * options.heads * options.head_dim
    times = report.times_of(samples)
    return row | times | {"tflops": flops / times["ms"] / 1e9}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("ring", __doc__, variants=",".join(VARIANTS), devices=jax.device_count())
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := sorted(set(options.variants) - set(VARIANTS)):
        parser.error(f"--variants: expected some of {', '.join(VARIANTS)}, received {', '.join(unknown)}")
    options.check = 1024
    if options.quick:
        heads = max(4, options.devices)
        options.tokens, options.heads, options.kv_heads, options.head_dim = "256", heads, heads, 16
        options.dtype, options.samples, options.calls, options.check = "float32", 1, 1, 64
    if not 2 <= options.devices <= jax.device_count():
        parser.error(
            f"--devices: expected 2 to the {jax.device_count()} that JAX sees, received {options.devices}"
        )
    default = "32768,131072" if options.devices == 2 else "65536,131072"
    options.tokens = [int(count) for count in (options.tokens or default).split(",")]
    of_one = options.tokens if options.devices == 2 else [min(options.tokens)]
    options.longest = max(of_one)
    """Of the rows of one device, the one that all of them take as many times as long."""
    return options


def goals(rows: Sequence[dict[str, Any]], options: argparse.Namespace, on_gpus: bool) -> list[dict[str, Any]]:
    """Goals and what came of them; `None` where it was not measured."""

    def goal(
        what: str, wanted: float, value: float | None, by: str | None, is_met: Callable[..., bool]
    ) -> Any:
        judged = on_gpus and value is not None
        entry = {"goal": what, "wanted": wanted, "found": value, "by": by}
        return entry | {"met": is_met(value, wanted) if judged else None}

    of_many = {tokens: share * options.devices for tokens, share in SHARES.items()}
    wanted_of = GOALS if options.devices == 2 else of_many
    result = []
    for tokens, wanted in (dict.fromkeys(options.tokens, 1.0) if options.quick else wanted_of).items():
        mine = [r for r in rows if r["tokens"] == tokens and r["variant"] in OURS and "speedup" in r]
        best = max(mine, key=lambda row: row["speedup"], default={})
        what = f"{tokens} tokens, times as fast as one device"
        result.append(goal(what, wanted, best.get("speedup"), best.get("variant"), operator.ge))
    longest = options.longest
    needs = {(row["variant"], row["tokens"]): row.get("memory_bytes") for row in rows}
    one, all_of_them = needs.get(("flash", longest)), needs.get(("zigzag", longest * options.devices))
    value = all_of_them / one if one and all_of_them else None
    what = f"{longest * options.devices} tokens on {options.devices} devices, memory of each over that of {longest} on one"
    return [*result, goal(what, _MEMORY, value, "zigzag", operator.le)]


def main(arguments: Sequence[str] | None = None) -> int:
    options, rows = parse(arguments), []
    asked = [(tokens, name) for tokens in options.tokens for name in options.variants]
    if {"flash", "zigzag"} <= set(options.variants):
        asked.append((options.longest * options.devices, "zigzag"))
    one: dict[int, float | None] = {}
    for tokens, name in asked:
        row = measure(name, tokens, options)
        if name == "flash":
            one[tokens] = row.get("ms")
        if one.get(tokens) and "ms" in row:
            row["speedup"] = one[tokens] / row["ms"]
        rows.append(row)
        print(f"{tokens} {name}: {row.get('reason') or report.number(row['ms']) + ' ms'}", flush=True)
    sizes = f"H{options.heads} K{options.kv_heads} D{options.head_dim}, {options.dtype}"
    print(f"forward and backward, causal, {sizes}, {options.devices} devices")
    shown = [row | {"gb": (row.get("memory_bytes") or 0) / 1e9} for row in rows]
    print(report.table_of("ring", shown))
    reached = goals(rows, options, jax.default_backend() == "gpu")
    says = {True: "yes", False: "no", None: "-"}
    shown = [goal | {"met": says[goal["met"]]} for goal in reached]
    print(report.table_of("goals", shown))
    names = ("devices", "heads", "kv_heads", "head_dim", "dtype")
    report.save(options, size={name: getattr(options, name) for name in names}, rows=rows, goals=reached)
    return int(any(row.get("reason", "").startswith("wrong") for row in rows))
