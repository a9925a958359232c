"""options.py check NAME… | time [NAME…]: variants of attention's forward on Hopper by the configuration's `hopper_ends` and `hopper_patience`.

`check` compiles the variants of problems and compares them with float64 on the device; `time` times all in one process, in random order, by the clock and
by the device's trace, and prints for each variant ms, its share of the default's time, and its time a visible tile of 128 x 128 over plain causal attention at
S4096 of the default kernel and of the same variant. Variants that `check` found wrong are not timed."""

import dataclasses
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import JaxWork, repeated
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import tile_sizes
from ejkernel_eqx.dispatch import device_facts

RUNS, ROUNDS, TRACED = 6, 12, 16
OUT = pathlib.Path(os.environ["D"])
C = dict(right=0)
W = dict(b=4, s=4096, h=16, kv=16, d=128)
N = dict(b=4, s=4096, h=32, kv=32, d=64)
PROBLEMS = {
    "causal128": dict(**W, spec=C),
    "short128": dict(W, b=16, s=1024, spec=C),
    "window128": dict(**W, spec=dict(left=1023, **C)),
    "docs1024_128": dict(**W, spec=C, docs=1024),
    "docs128": dict(**W, spec=C, docs="random"),
    "cap128": dict(**W, spec=dict(logits_soft_cap=30.0, **C)),
    "full128": dict(**W, spec={}),
    "causal64": dict(**N, spec=C),
    "short64": dict(N, b=16, s=1024, spec=C),
    "window64": dict(**N, spec=dict(left=1023, **C)),
    "docs1024_64": dict(**N, spec=C, docs=1024),
    "docs64": dict(**N, spec=C, docs="random"),
    "cap64": dict(**N, spec=dict(logits_soft_cap=30.0, **C)),
    # Checked and timed at the end, if there is time.
    "gqadocs128": dict(W, h=32, kv=8, spec=C, docs="random"),
    "odd128": dict(b=3, s=3999, h=16, kv=4, d=128, spec=dict(left=700, **C), docs="random"),
}
VARIANTS = {
    "apart": ("apart", 0),
    "joined": ("joined", 0),
    "by_warp": ("joined_by_warp", 0),
    "one_loop": ("one_loop", 0),
    "joined8": ("joined", 8),
    "apart8": ("apart", 8),
}


def say(*words):
    print(*words, flush=True)


def documents(p):
    rng, (batch, length, kind) = np.random.default_rng(0), (p["b"], p["s"], p["docs"])
    if kind == "random":
        cuts = [np.sort(rng.choice(np.arange(1, length), 7, replace=False)) for _ in range(batch)]
    else:
        cuts = [np.arange(kind, length, kind)] * batch
    ids = np.zeros((batch, length), np.int32)
    for b in range(batch):
        ids[b, cuts[b]] = 1
    return np.cumsum(ids, 1).astype(np.int32)


def seen(p, ids, b):
    i, j = np.arange(p["s"])[:, None], np.arange(p["s"])[None]
    found = np.ones((p["s"], p["s"]), bool) if ids is None else ids[b][:, None] == ids[b][None]
    if "right" in p["spec"]:
        found = found & (j <= i + p["spec"]["right"])
    if "left" in p["spec"]:
        found = found & (j >= i - p["spec"]["left"])
    return found


def visible(p):
    """Tiles of 128 x 128 of all heads that have something visible."""
    ids, n, total = documents(p) if "docs" in p else None, -(-p["s"] // 128) * 128, 0
    for b in range(p["b"]):
        whole = np.zeros((n, n), bool)
        whole[: p["s"], : p["s"]] = seen(p, ids, b)
        total += int(whole.reshape(n // 128, 128, n // 128, 128).any((1, 3)).sum())
        if ids is None:
            total *= p["b"]
            break
    return total * p["h"]


def make(p):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (p["b"], p["s"], heads, p["d"]), jnp.bfloat16)
        for key, heads in zip(keys, (p["h"], p["kv"], p["kv"]), strict=True)
    )
    arrays, spec = AttentionArrays(q, k, v), dict(scale=p["d"] ** -0.5, **p["spec"])
    if "docs" in p:
        ids = jnp.asarray(documents(p))
        arrays, spec = arrays._replace(q_segments=ids, kv_segments=ids), spec | dict(same_segments=True)
    return arrays, AttentionSpec(**spec)


def functions(p, arrays, spec):
    of = problem_of("flash_attention", arrays, spec)
    default = triton.TileConfig(*tile_sizes.tiles(of, device_facts())[0])
    small = triton.TileConfig(64, 64, 4, 2)
    tiles = {"default": default}
    narrow = default if default.block_q == 128 else dataclasses.replace(default, block_q=128, num_stages=4)
    for name, (ends, patience) in VARIANTS.items():
        tile = dataclasses.replace(narrow, hopper_ends=ends, hopper_patience=patience)
        if tile != default and triton.config_unsupported(triton.TritonConfig(tile, small, small), of, device_facts()) is None:
            tiles[name] = tile
    return {
        name: (lambda arrays, c=triton.TritonConfig(tile, small, small): triton.forward(arrays, spec, c))
        for name, tile in tiles.items()
    }


def reference(p, arrays, spec, b, h):
    group = p["h"] // p["kv"]
    q, k, v = (np.asarray(x[b, :, i], np.float64) for x, i in ((arrays.q, h), (arrays.k, h // group), (arrays.v, h // group)))
    s = (q @ k.T) * spec.scale
    if spec.logits_soft_cap:
        s = spec.logits_soft_cap * np.tanh(s / spec.logits_soft_cap)
    s = np.where(seen(p, None if arrays.q_segments is None else np.asarray(arrays.q_segments), b), s, -np.inf)
    m = s.max(1, keepdims=True)
    w = np.exp(s - m)
    t = w.sum(1, keepdims=True)
    return (w @ v) / t, (m + np.log(t))[:, 0]


def check(name):
    p, begin = PROBLEMS[name], time.time()
    arrays, spec = make(p)
    results, good = {}, {}
    for variant, f in functions(p, arrays, spec).items():
        try:
            jax.jit(repeated(f, RUNS)).lower(arrays).compile()  # for the cache
            once = jax.jit(f)
            results[variant] = jax.block_until_ready(once(arrays))
            again = once(arrays)
            good[variant] = all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in zip(results[variant], again, strict=True))
            if not good[variant]:
                say("check", name, variant, "NOT REPEATABLE")
        except Exception as error:
            good[variant] = False
            say("Error", name, variant, str(error)[-1500:])
    for b, h in ((0, 0), (p["b"] - 1, p["h"] - 1)):
        out, lse = reference(p, arrays, spec, b, h)
        for variant, (x, y) in results.items():
            e = np.asarray(x[b, :, h], np.float64) - out
            rms, most = float(np.sqrt((e**2).mean() / (out**2).mean())), float(np.abs(np.asarray(y[b, h], np.float64) - lse).max())
            fine = rms < 6e-3 and most < 2e-2
            good[variant] = good[variant] and fine
            say("check", name, variant, "out %.2e lse %.2e" % (rms, most), "ok" if fine else "WRONG")
    # All heads, against the default's.
    for variant, (x, _) in results.items():
        away = float(jnp.abs(x.astype(jnp.float32) - results["default"][0].astype(jnp.float32)).max()) if "default" in results else 0.0
        if not away < 0.1:
            good[variant] = False
            say("check", name, variant, "differs from the default by", away)
    (OUT / f"checked_{name}.json").write_text(json.dumps(good))
    say("compiled and checked", name, "%.1f s" % (time.time() - begin))


def traced(calls, order):
    """Of each call in random order: microseconds of the main kernel, and from the first kernel's start to its end."""
    for call in calls.values():
        jax.block_until_ready(call())
    sequence = [name for _ in range(TRACED) for name in order.sample(list(calls), len(calls))]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            last = None
            for name in sequence:
                last = calls[name]()
            jax.block_until_ready(last)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    events = sorted(
        (e.start_ns, e.duration_ns, e.name)
        for plane in data.planes if plane.name.startswith("/device:GPU")
        for line in plane.lines if line.name.startswith("Stream")
        for e in line.events
    )
    found, first, number = {name: [] for name in calls}, None, 0
    for start, duration, kernel in events:
        first = start if first is None else first
        if "forward" in kernel or "joined" in kernel:
            found[sequence[number]].append((duration / 1e3, (start + duration - first) / 1e3))
            first, number = None, number + 1
    assert number == len(sequence), (number, len(sequence))
    return {name: np.median(x[2:], 0) for name, x in found.items()}


def timed(names):
    order, record = random.Random(0), {"device": jax.devices()[0].device_kind, "runs": RUNS}
    say(record)
    prepared, begin = {}, time.time()
    for name in names:
        p = PROBLEMS[name]
        arrays, spec = make(p)
        checked = OUT / f"checked_{name}.json"
        good = json.loads(checked.read_text()) if checked.exists() else {}
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        prepared[name] = {
            v: (jax.jit(f).lower(avals).compile(), jax.jit(repeated(f, RUNS)).lower(avals).compile())
            for v, f in functions(p, arrays, spec).items() if good.get(v, False)
        }
        if missing := set(functions(p, arrays, spec)) - set(prepared[name]):
            say(name, "not timed, as not checked or wrong:", *sorted(missing))
    say("compiled again in %.0f s" % (time.time() - begin))
    tiles = {name: visible(PROBLEMS[name]) for name in names}
    for name in names:
        begin = time.time()
        beside = f"causal{PROBLEMS[name]['d']}"
        arrays, plain = make(PROBLEMS[name])[0], make(PROBLEMS[beside])[0] if beside != name and beside in prepared else None
        ring = {v: (f, arrays) for v, f in prepared[name].items()}
        if plain is not None:
            ring |= {f"plain {v}": (f, plain) for v, f in prepared[beside].items()}
        works = {v: JaxWork(many, [(x,)]) for v, ((_, many), x) in ring.items()}
        for work in works.values():
            work.sample(1)
        launches = {v: max(1, round(0.010 / max(work.sample(1), 1e-4))) for v, work in works.items()}
        samples = {v: [] for v in works}
        for _ in range(ROUNDS):
            for v in order.sample(list(works), len(works)):
                samples[v].append(works[v].sample(launches[v]) / launches[v] / RUNS * 1e3)
        clock = {v: float(np.median(x)) for v, x in samples.items()}
        try:
            trace = traced({v: (lambda one=one, x=x: one(x)) for v, ((one, _), x) in ring.items()}, order)
        except Exception:
            trace = {}
            say("trace failed", traceback.format_exc()[-300:])
        share = tiles[name] / tiles.get(beside, tiles[name])

        def row(times):
            parts = []
            for v in prepared[name]:
                plains = [times.get(f"plain {w}", times.get(w)) if plain is not None else times.get(w) for w in ("default", v)]
                a_tile = ["%.3f" % (times[v] / share / x) if x else "-" for x in plains]
                parts.append("%s %.4g (%.3f; tile %s, own %s)" % (v, times[v], times[v] / times["default"], *a_tile))
            return "  ".join(parts)

        say(name, "tiles", tiles[name], "clock ms:", row(clock))
        if trace:
            say("    kernel us:", row({v: float(x[0]) for v, x in trace.items()}))
            say("    whole  us:", row({v: float(x[1]) for v, x in trace.items()}), "  took %.1f s" % (time.time() - begin))
        record[name] = dict(tiles=tiles[name], clock=clock, trace={v: [float(y) for y in x] for v, x in trace.items()}, samples=samples)
        (OUT / "options.json").write_text(json.dumps(record))


def main():
    mode, names = sys.argv[1], sys.argv[2:] or list(PROBLEMS)
    if mode == "check":
        for name in names:
            try:
                check(name)
            except Exception:
                traceback.print_exc()
    else:
        timed(names)


main()
