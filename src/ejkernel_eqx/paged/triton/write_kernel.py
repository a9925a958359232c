"""Writes new tokens into pages in Triton, in place if the pages are donated, and quantises them."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ...core import Named
from ...launch import Launch, Launcher, Options, result, result_like, run
from ...launch.sizes import cdiv, padded
from ..cache.quantise import LARGEST
from ..spec import WriteArrays
from .tile import HEAD, TOKEN

_PLAIN, _TOKEN, _HEAD = 0, 1, 2
_FEW, _MANY = 1024, 4096  # elements per program; `_MANY` if `_FEW` would need more than `_PROGRAMS` programs
_PROGRAMS = 1024
_LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # of float32
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 of this magnitude has no fractional bits


@triton.jit
def _load_rows(new_ptr, source, written, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `source` of the new tokens, `[BLOCK, BLOCK_D]`, zero where not `written`."""
    c = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = written[:, None]  # [BLOCK, 1], and then [BLOCK, BLOCK_D]
    if D != BLOCK_D:
        inside = inside & (c < D)[None, :]
    return tl.load(new_ptr + (source * D)[:, None] + c[None, :], mask=inside, other=0.0)  # [BLOCK, BLOCK_D]


@triton.jit
def _store_rows(
    x, pages_ptr, given_scale_ptr, scale_ptr, target, scale_at, written,  # [BLOCK, BLOCK_D]; [BLOCK]
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Stores rows `x` as rows `target` of the pages, where `written`, with their scales."""
    c = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = written[:, None]  # [BLOCK, 1], and then [BLOCK, BLOCK_D]
    if D != BLOCK_D:
        inside = inside & (c < D)[None, :]
    stored = pages_ptr.dtype.element_ty
    # Quantised: stored is x / scale, with the row's own scale or the head's given one.
    if SCALES != 0:
        x = x.to(tl.float32)  # [BLOCK, BLOCK_D]
        if SCALES == TOKEN:
            # Compared as integers, so that NaN has the largest magnitude and is kept.
            largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)  # [BLOCK]  # fmt: skip
            scale = tl.div_rn(largest, LARGEST)  # [BLOCK]
            scale = tl.where(scale < _LEAST_NORMAL, 1.0, scale)  # 1 if too small to divide by
            tl.store(scale_ptr + scale_at, scale, mask=written)
        else:
            scale = tl.load(given_scale_ptr + scale_at, mask=written, other=1.0)  # [BLOCK]
        x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])  # [BLOCK, BLOCK_D]
        # Numbers outside the range of a given scale are clipped; NaN is kept if the dtype has it.
        nan = x != x  # [BLOCK, BLOCK_D]
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        if stored == tl.int8:
            x = (x + _ROUNDING) - _ROUNDING  # to the nearest integer, ties to even
            x = tl.where(nan, 0.0, x)
        else:
            x = tl.where(nan, float("nan"), x)
    tl.store(pages_ptr + (target * D)[:, None] + c[None, :], x.to(stored), mask=inside)


@triton.jit
def _scale_at(target, head, group, SCALES: tl.constexpr, MAPPED: tl.constexpr):
    """The positions of the scales of rows, `[BLOCK]`: by row, or by head, which may be within a group."""
    at = target
    if SCALES == HEAD:
        at = head
        if MAPPED:
            at += group
    return at


@triton.jit
def write_kernel(
    a_new_ptr, b_new_ptr, slots_ptr,  # [tokens, K, A], [tokens, K, B], [tokens]
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, ROWS, T, SLOTS,  # pages [SLOTS, K, A or B], scales [SLOTS, K] or [K]
    new_a_ptr, new_b_ptr, new_a_scale_ptr, new_b_scale_ptr,  # the same, in place
    K: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, A_LARGEST: tl.constexpr, B_LARGEST: tl.constexpr, MAPPED: tl.constexpr,
    A_MAPPED: tl.constexpr, B_MAPPED: tl.constexpr,
):  # fmt: skip
    # A row is one token and head; all numbers below are [BLOCK].
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = row // K, row % K
    slot = tl.load(slots_ptr + token, mask=row < ROWS, other=-1)
    written = (slot >= 0) & (slot < SLOTS)
    source = row.to(tl.int64)
    # The destination of each row.
    target = slot.to(tl.int64) * K + head
    if MAPPED:
        target += (token // T).to(tl.int64) * SLOTS * K
    group = token // T * K  # the heads of the row's own pages
    a_scale_at = _scale_at(target, head, group, A_SCALES, A_MAPPED)
    b_scale_at = _scale_at(target, head, group, B_SCALES, B_MAPPED)
    a = _load_rows(a_new_ptr, source, written, A, BLOCK_A)
    if B > 0:  # before any store, so that no load waits for one
        b = _load_rows(b_new_ptr, source, written, B, BLOCK_B)
    _store_rows(a, new_a_ptr, a_scale_ptr, new_a_scale_ptr, target, a_scale_at, written, A, BLOCK_A, A_SCALES, A_LARGEST)  # fmt: skip
    if B > 0:
        _store_rows(b, new_b_ptr, b_scale_ptr, new_b_scale_ptr, target, b_scale_at, written, B, BLOCK_B, B_SCALES, B_LARGEST)  # fmt: skip


def write(arrays: WriteArrays) -> Named:
    """Writes new tokens, as `cache.write.write`: with leading axes on the pages, tokens and slots have these axes too."""
    results = dict(arrays.pages)
    # Arrays written in place come first in a launch, and so do pages whose scales are written.
    names = sorted(arrays.new, key=lambda name: _scales_of(arrays, name) != _TOKEN)
    # Two kinds of pages per launch: keys and values, or latents and rotary keys.
    for first in range(0, len(names), 2):
        launch, inputs = write_launch(arrays, names[first : first + 2])
        written = run(launch, inputs)
        for letter, name in zip("ab", names[first : first + 2]):
            results[name] = written[f"new_{letter}_ptr"]
            if launch.constants[f"{letter.upper()}_SCALES"] == _TOKEN:
                results[f"{name}_scale"] = written[f"new_{letter}_scale_ptr"]
    return results


def _scales_of(arrays: WriteArrays, name: str) -> int:
    scale = arrays.pages.get(f"{name}_scale")
    return _PLAIN if scale is None else _TOKEN if scale.ndim == arrays.pages[name].ndim - 1 else _HEAD


def write_launch(arrays: WriteArrays, names: list[str]) -> tuple[Launch, dict[str, Any]]:
    """The launch for one or two kinds of pages, each with or without scales."""
    given, slots, kept = arrays.pages, arrays.slots, arrays.pages[names[0]]
    kv_heads, aliased = kept.shape[-2], ["a", "b"]
    # A missing second kind, or missing scales, are neither read nor written.
    absent = slots if len(names) == 2 else jnp.zeros((1,), slots.dtype)

    inputs: Named = {"slots": slots}
    numbers: dict[str, Any] = {"K": kv_heads, "MAPPED": kept.ndim > 4}
    numbers |= {"T": slots.size // max(1, math.prod(kept.shape[:-4])), "SLOTS": math.prod(kept.shape[-4:-2])}
    for letter, name in itertools.zip_longest("ab", names, fillvalue=""):
        inputs[f"{letter}_new"] = new = arrays.new.get(name, absent)
        inputs[letter] = pages = given.get(name, absent)
        scale = given.get(f"{name}_scale")
        inputs[f"{letter}_scale"] = absent if scale is None else scale
        scales = _scales_of(arrays, name)
        aliased += [f"{letter}_scale"] if scales == _TOKEN else []
        width, letter = new.shape[-1] if name else 0, letter.upper()
        numbers[f"{letter}_SCALES"] = scales
        numbers[f"{letter}_MAPPED"] = scales == _HEAD and scale is not None and scale.ndim > 1
        numbers |= {letter: width, f"BLOCK_{letter}": padded(width, 1)}
        numbers[f"{letter}_LARGEST"] = LARGEST.get(pages.dtype.name, 0.0)
    rows = slots.size * kv_heads
    assert rows < 2**31 - _MANY, rows
    widest = max(numbers["BLOCK_A"], numbers["BLOCK_B"])
    elements = _FEW if rows * widest <= _FEW * _PROGRAMS else _MANY
    block = min(max(1, elements // widest), padded(rows, 1))
    nothing = result(1, dtype=slots.dtype)
    results = dict.fromkeys(("a", "b", "a_scale", "b_scale"), nothing)
    results |= {name: result_like(inputs[name]) for name in aliased}
    outputs, aliases = ({f"new_{name}": x for name, x in results.items()}, {x: f"new_{x}" for x in aliased})
    launcher = Launcher("paged.cache", inputs, numbers | {"ROWS": rows, "BLOCK": block}, slots)
    programs = cdiv(rows, block)
    return launcher.launch(write_kernel, Options(4), outputs, programs, aliases=aliases, name="write")
