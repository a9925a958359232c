"""Counts the files and functions of the package between a user's line and the launch of a kernel, in the first call of a fresh process.

`python -m tests.corridor` prints a table; `python -m tests.corridor "op(q, k, v)"` lists the functions of one call, in order.

Kernels run on `triton-interpret` under `jax.eval_shape`, on any machine. A function counts once. Comprehensions are parts of their function,
as in Python 3.12 and newer. Importing modules and what lies behind the launch (`testing/`) do not count."""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = pathlib.Path(str(ejx.__file__)).parent
BEHIND_THE_LAUNCH = "testing/"
_IMPORTING = "_find_and_load"
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Corridor(NamedTuple):
    """The functions that a call runs, each as `file:line name`, and the most frames of the package on the stack."""

    functions: list[str]
    depth: int

    @property
    def files(self) -> set[str]:
        return {function.partition(":")[0] for function in self.functions}


def corridor_of(call: Callable[[], Any]) -> Corridor:
    """The functions of the package that `call()` runs up to the launch."""
    functions: dict[str, None] = {}
    depth = deepest = skipped = 0

    def observe(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest, skipped
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in _INLINED:
            return
        step = 1 if event == "call" else -1
        is_ours = code.co_filename.startswith(f"{SOURCE}/")
        name = code.co_filename.removeprefix(f"{SOURCE}/")
        if code.co_name == _IMPORTING or (is_ours and name.startswith(BEHIND_THE_LAUNCH)):
            skipped += step
        elif is_ours and not skipped:
            depth += step
            deepest = max(deepest, depth)
            functions.setdefault(f"{name}:{code.co_firstlineno} {code.co_qualname}")

    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Corridor(list(functions), deepest)


def attention() -> Iterator[tuple[str, Callable[[], Any]]]:
    operations: list[Any] = []
    build = functools.partial(ejx.FlashAttention, causal=True, platform="triton-interpret")
    yield "FlashAttention(...)", lambda: operations.append(build())
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.float32)
    yield "op(q, k, v)", lambda: jax.eval_shape(lambda *given: operations[0](*given), q, q, q)


def mamba2() -> Iterator[tuple[str, Callable[[], Any]]]:
    options = {"head_dim": 16, "state_size": 16, "platform": "triton-interpret"}
    mixer = eqx.filter_eval_shape(lambda key: ejx.nn.Mamba2Mixer(64, key=key, **options), jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, 64, 64), jnp.float32)
    yield "Mamba2Mixer", lambda: eqx.filter_eval_shape(lambda mixer, x: mixer(x), mixer, x)


def corridors_of(calls: Callable[[], Iterator[tuple[str, Callable[[], Any]]]]) -> dict[str, Corridor]:
    """The corridors of the calls, which a fresh process makes one after the other."""
    program = [sys.executable, "-m", "tests.corridor", calls.__name__]
    folders = os.pathsep.join(map(str, (SOURCE.parent, ROOT)))
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("EJKERNEL", "JAX", "XLA"))}
    environment = kept | {"PYTHONPATH": folders, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name: Corridor(*corridor) for name, corridor in json.loads(done.stdout).items()}


def main(argument: str = "") -> None:
    every = {calls.__name__: calls for calls in (attention, mamba2)}
    if argument in every:
        print(json.dumps({name: corridor_of(call) for name, call in every[argument]()}))
        return
    known = {name: corridor for calls in every.values() for name, corridor in corridors_of(calls).items()}
    if argument:
        print(*known[argument].functions, sep="\n")
        return
    print(f"{'call':24}{'files':>6}{'functions':>11}{'depth':>7}")
    for name, corridor in known.items():
        print(f"{name:24}{len(corridor.files):6}{len(corridor.functions):11}{corridor.depth:7}")


if __name__ == "__main__":
    main(*sys.argv[1:])
