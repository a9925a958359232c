"""The family's one kind of call, for `core/`: its problem and its axes."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import Kind, Named
from ..dispatch import Problem
from ..parallel import given_of
from . import reference
from .masks.bounds.classify import visible_share
from .spec import AttentionArrays, AttentionSpec, LEARNED, RowRanges

T = TypeVar("T")

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""Names of the two residuals that only the kernel can recompute, for `jax.checkpoint_policies.save_only_these_names`."""

_ROWS = tuple(f"rows.{name}" for name in RowRanges._fields)


def problem_of(operation: str, arrays: AttentionArrays, spec: AttentionSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones.

    A bias or mask is described by the pattern of its axes, except for the leading ones, which differ between the forward and the
    backward of one call under `vmap`. `nested`: more than one leading axis. `unseen`: the static window leaves a query without keys
    or a key without queries.
    """
    q, k, v, bias = arrays.q, arrays.k, arrays.v, arrays.bias
    dims = {"B": math.prod(q.shape[:-3]), "T": q.shape[-3], "H": q.shape[-2], "D": q.shape[-1]}
    dims |= {"S": k.shape[-3], "K": k.shape[-2], "V": v.shape[-1]}
    segments = arrays.q_segments is not None
    symbolic = not (isinstance(dims["T"], int) and isinstance(dims["S"], int))
    flags = {
        "bias": _pattern(bias),
        "mask": _pattern(arrays.mask),
        "alibi_slopes": arrays.alibi_slopes is not None,
        "sinks": arrays.sinks is not None,
        "rows": arrays.rows is not None,
        "segments": segments,
        "same_segments": segments and spec.same_segments,
        "causal": spec.right == 0,
        "window": (spec.left, spec.right) if spec.ranged else None,
        "unseen": spec.ranged and (symbolic or not spec.covers(dims["T"], dims["S"])),
        "top_left": spec.offset == 0,
        "soft_cap": spec.logits_soft_cap is not None,
        "negative_scale": spec.scale <= 0,
        "dropout": spec.dropout_rate > 0,
        "deterministic": spec.deterministic,
        "lse": spec.return_lse,
        "nested": sum([size != 1 for size in q.shape[:-3]]) > 1,
    }
    if spec.listed:
        flags["tiles"] = _tiles(spec, dims["T"], dims["S"])
        flags["block_size"] = spec.block_size
    requirements = {"deterministic", "lse", "nested"}
    cap = spec.logits_soft_cap
    # A polynomial, or a tanh found again from a weight, would not do for such a soft cap.
    if cap is not None and not (1e-2 <= cap <= 1e9 and 1e-18 * cap <= abs(spec.scale) <= 1e6 * cap):
        flags["extreme_cap"] = True
    if arrays.log_forget is not None:
        flags["log_forget"] = True
    if spec.score_mod is not None:
        flags["score_mod"] = True
        requirements.add("score_mod")
    dtypes = {"qkv": q.dtype} if bias is None else {"qkv": q.dtype, "bias": bias.dtype}
    return Problem.make(
        operation,
        dims=dims,
        dtypes=dtypes,
        flags=flags,
        lengths={"B", "T", "S"},
        counts={"H", "K"},
        requirements=requirements,
    )


def _tiles(spec: AttentionSpec, queries: int, keys: int) -> str:
    """Returns how many of the tiles a pattern leaves visible: `"1/n"`, where `n` is a power of two; `"any"` if a map of blocks decides."""
    if spec.pattern is None:
        return "any"
    share = visible_share(spec.pattern, queries, keys)
    return f"1/{1 << min(round(-math.log2(max(share, 2**-10))), 10)}"


def _pattern(x: Any) -> str | None:
    """Returns which of the axes `H`, `T`, `S` an array over the scores has, for example `"1TS"`; `None` without an array."""
    if x is None:
        return None
    return "".join(letter if size != 1 else "1" for letter, size in zip("HTS", x.shape[-3:], strict=True))


def axes_of(arrays: AttentionArrays, spec: AttentionSpec | None = None) -> dict[str, tuple[str, ...]]:
    """The axes after the leading ones, for every possible array and for the results."""
    heads, kv_heads = f"H{arrays.q.shape[-2]}", f"H{arrays.k.shape[-2]}"
    scores, queries = (heads, "T", "S"), ("T",)
    map_heads = "1" if arrays.blocks is None else f"H{arrays.blocks.shape[-3]}"
    return {
        "q": ("T", heads, "D"),
        "k": ("S", kv_heads, "D"),
        "v": ("S", kv_heads, "V"),
        "bias": scores,
        "alibi_slopes": (heads,),
        "sinks": (heads,),
        "log_forget": ("S", heads),
        "mask": scores,
        "q_segments": queries,
        "kv_segments": ("S",),
        **dict.fromkeys(_ROWS, queries),
        "seeds": (heads, "two"),
        "blocks": (map_heads, "M", "N"),
        "heads": (heads,),
        "out": ("T", heads, "V"),
        "lse": (heads, "T"),
    }


def arrays_of(make: Callable[..., T] = AttentionArrays, /, **given: Array) -> T:
    """The arrays of a call from keyword arguments."""
    rows = RowRanges(*(given.pop(name) for name in _ROWS)) if _ROWS[0] in given else None
    return make(**given, rows=rows)


class AttentionKind(Kind):
    def attend(self, plan: Plan, operation: str, arrays: Any, spec: AttentionSpec) -> Any:
        """The output `[..., T, H, V]`, and with `return_lse` the log-sum-exp `[..., T, H]`, on the platform that the plan chooses."""
        results = self.call(plan, operation, arrays, spec)
        return (results["out"], jnp.swapaxes(results["lse"], -1, -2)) if spec.return_lse else results["out"]

    def given_of(self, arrays: Any) -> dict[str, Any]:
        named = super().given_of(arrays)
        rows = named.pop("rows", None)
        return named if rows is None else named | dict(zip(_ROWS, rows, strict=True))

    def differentiates(self, platform: Any) -> bool:
        """Returns whether the platform has its own derivative, as a vendor's library does; it returns no lse."""
        return hasattr(platform, "attend")

    def plainly(self, platform: Any, arrays: Any, spec: Any, config: Any) -> Named:
        return {"out": platform.attend(arrays, spec)}

    def forward(self, platform: Any, arrays: Any, spec: Any, config: Any, save: bool) -> Named:
        return dict(zip(self.results, platform.forward(arrays, spec, config), strict=True))

    def backward(self, platform: Any, arrays: Any, spec: Any, config: Any, *states: Named) -> Named:
        # Saved results, then their cotangents.
        results = [state[name] for state in states for name in ("out", "lse")]
        return given_of(platform.backward(arrays, spec, config, *results))

    def told(self, spec: AttentionSpec, runs: Mapping[str, int], over: tuple[str, ...]) -> AttentionSpec:
        own = {f"{name}_run": run for name, run in runs.items()}
        return dataclasses.replace(spec, **own, bias_over=over) if own or over else spec


ATTEND = AttentionKind(
    make=arrays_of,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference.attend,
    results=("out", "lse"),
    learned=LEARNED,
    broadcast=frozenset(AttentionArrays._fields) - {"q", "k", "v", "seeds"} | frozenset(_ROWS),
    kept=frozenset(("bias", "mask")),
    read=("out", "lse"),
    unbounded=("lse",),
    wanted=lambda spec: ("out", "lse") if spec.return_lse else ("out",),
    names={"out": OUT_NAME, "lse": LSE_NAME},
    remedy="Use ejkernel_eqx.Attention for forward mode and second derivatives: it computes the same, in memory of the size of the scores. "
    "Second derivatives alone (jax.hessian) exist on platform='xla', too.",
)
