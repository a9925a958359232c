"""Checks what a user passes to an attention operation and resolves it to `AttentionArrays` and `AttentionSpec`.

Errors are raised before anything is computed and name the argument, what was expected, what was received, and the remedy.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._kernel import Kernel, Plan
from .._values import check_between, check_int32, check_offsets, FAR
from ..core.arguments import accumulator, read_gates
from ..core.arguments import array as float_array
from ..core.plans import plan_of
from .log_forget import of_tokens
from .masks.lower import lower, Lowered
from .masks.mask import Mask, Window
from .score_mod import check_score_mod, known_form, ScoreMod
from .spec import AttentionArrays, AttentionSpec


def is_cap(cap: float) -> bool:
    """Returns whether scores over the cap, and their tanh times it, are numbers of float32."""
    return 1e-30 <= cap <= 1e30


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """The static options shared by every softmax attention."""

    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    score_mod: ScoreMod | None = None

    def __post_init__(self):
        if self.logits_soft_cap is not None and not is_cap(self.logits_soft_cap):
            raise ValueError(
                f"logits_soft_cap: expected a number from 1e-30 to 1e+30 or None, received {self.logits_soft_cap}; None disables it."
            )
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise ValueError(
                f"softmax_scale: expected a finite number or None, received {self.softmax_scale}; None means D**-0.5."
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate: expected a probability in [0, 1), received {self.dropout_rate}.")
        if self.score_mod is not None:
            check_score_mod(self.score_mod)


class MaskInputs(NamedTuple):
    """The arguments of a call that determine what is visible, and the operation's own mask."""

    mask: Any = None
    segment_ids: Any = None
    kv_segment_ids: Any = None
    cu_seqlens: Any = None
    kv_cu_seqlens: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_offset: Any = None
    own: Mask = Mask()


class ScoreInputs(NamedTuple):
    """The arguments of a call that change scores or weights, or decide what is returned."""

    bias: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    key: Any = None
    inference: bool | None = False
    return_lse: bool = False
    log_forget: Any = None


def parse_window(sliding_window: Any, causal: bool) -> Window:
    """`(left, right)` key counts, excluding the query's own key, from an int or a pair; `ValueError` for anything else."""
    if sliding_window is None:
        return (None, None)
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int | tuple | list | np.integer):
        raise ValueError(
            f"sliding_window: expected an int, a pair (left, right) or None, received {sliding_window!r}."
        )
    if isinstance(sliding_window, int | np.integer):
        if not causal:
            raise ValueError(
                f"sliding_window: expected a pair (left, right) when causal=False, received the int {sliding_window}; "
                "an int counts the keys up to and including the query's own and requires causal=True."
            )
        if sliding_window < 1:
            raise ValueError(
                f"sliding_window: expected at least 1 key (the query's own), received {sliding_window}."
            )
        return (int(sliding_window) - 1, 0)
    pair = tuple(sliding_window)
    if len(pair) != 2 or any(
        side is not None and (not isinstance(side, int | np.integer) or side < 0) for side in pair
    ):
        raise ValueError(
            f"sliding_window: expected a pair of key counts, each >= 0 or None, received {sliding_window!r}."
        )
    return (None if pair[0] is None else int(pair[0]), None if pair[1] is None else int(pair[1]))


class Windowed(Kernel):
    """The options that operations of softmax attention with a window share."""

    causal: bool = eqx.field(static=True)
    window: Window = eqx.field(static=True)
    options: ScoreOptions = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)
    inference: bool | None

    def _complete(self, causal: bool, sliding_window: Any, *request: Any) -> None:
        """Sets all but `options`, as the end of `__init__`; `request`: `platform`, `config`, `tune_for`."""
        self.causal, self.window = causal, parse_window(sliding_window, causal)
        self.inference = False
        self.plan = plan_of(type(self), self, *request)


def resolve(
    q: Any, k: Any, v: Any, options: ScoreOptions, masking: MaskInputs, scoring: ScoreInputs
) -> tuple[AttentionArrays, AttentionSpec]:
    """The resolved call. All masks are intersected."""
    qkv, keys = check_qkv(q, k, v), k.shape[-3]
    if scoring.log_forget is not None and not masking.own.is_causal:
        raise ValueError(
            "log_forget: expected None without causal=True, received gates, which are between a key and a later query; build the operation with "
            "causal=True."
        )
    return arranged(qkv, options, scoring, visible(masking, q.shape, keys), keys)


def arranged(
    qkv: tuple[Array, Array, Array], options: ScoreOptions, scoring: ScoreInputs, lowered: Lowered, every: int
) -> tuple[AttentionArrays, AttentionSpec]:
    """The call with a lowered mask. `every`: the number of keys in bias and mask, of which devices may have a part each."""
    q, k, v = qkv
    lead, queries, keys, heads = q.shape[:-3], q.shape[-3], k.shape[-3], q.shape[-2]
    if options.score_mod is not None and scoring.alibi_slopes is None:
        options, scoring = _with_known_form(options.score_mod, options, scoring, heads)
    cap, pattern, blocks = options.logits_soft_cap, lowered.pattern, lowered.blocks
    q_segments, kv_segments = lowered.segments or (None, None)
    aligned = queries == keys and lowered.rows is None and lowered.offset == 0
    spec = AttentionSpec(
        scale=float(q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale),
        logits_soft_cap=None if cap is None else float(cap),
        left=lowered.left,
        right=lowered.right,
        offset=lowered.offset,
        dropout_rate=0.0 if options.dropout_rate == 0 or scoring.inference else float(options.dropout_rate),
        deterministic=options.deterministic,
        return_lse=scoring.return_lse,
        same_segments=aligned and q_segments is not None and q_segments is kv_segments,
        pattern=pattern,
        block_size=lowered.block_size,
        score_mod=options.score_mod,
    )
    numbered = options.score_mod or (pattern is not None and pattern.heads > 0)
    arrays = AttentionArrays(
        q=q,
        k=k,
        v=v,
        bias=spread("bias", bias_of(scoring.bias, lead), lead, heads, queries, every),
        alibi_slopes=_per_head("alibi_slopes", scoring.alibi_slopes, q, f"[{heads}], one per query head"),
        sinks=_per_head("sinks", scoring.sinks, q, f"[{heads}]", f"[{heads}, n]"),
        mask=spread("mask", lowered.dense, lead, heads, queries, every),
        q_segments=spread("segment_ids", q_segments, lead, queries),
        kv_segments=spread("kv_segment_ids", kv_segments, lead, keys),
        rows=jax.tree.map(lambda x: _pad_lead(x, lead, 1), lowered.rows),
        seeds=_seeds(scoring.key, lead, heads) if spec.dropout_rate > 0 else None,
        blocks=None if blocks is None else spread("block_map", blocks, lead, heads, *blocks.shape[-2:]),
        heads=_pad_lead(jnp.arange(heads, dtype=jnp.int32), lead, 1) if numbered else None,
    )
    if scoring.log_forget is not None and keys > 0:
        arrays = of_tokens(arrays._replace(log_forget=_log_forget(scoring, lead, keys, heads)), spec)
    return arrays, spec


def _log_forget(scoring: ScoreInputs, lead: tuple[int, ...], keys: Any, heads: int) -> Array:
    given = scoring.log_forget
    array = jnp.asarray(given)
    if scoring.alibi_slopes is not None:
        raise ValueError(
            "log_forget: expected None with alibi_slopes, received both; a slope is a constant gate: add -slope to log_forget instead."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape != (*lead, keys, heads):
        raise ValueError(
            f"log_forget: expected floats {(*lead, keys, heads)}, one per key and query head, received {array.dtype} {array.shape}; "
            "project to the query heads, and pass the gates of cached keys, too."
        )
    return read_gates(array, given)


def _with_known_form(
    function: ScoreMod, options: ScoreOptions, scoring: ScoreInputs, heads: int
) -> tuple[ScoreOptions, ScoreInputs]:
    """A function of scores as a soft cap and ALiBi, which all kernels have, if that is what it is."""
    form = known_form(function, heads)
    # A soft cap comes before everything else.
    capped = options.logits_soft_cap is not None or scoring.bias is not None
    if form is None or (form.cap is not None and (capped or not is_cap(form.cap))):
        return options, scoring
    cap = options.logits_soft_cap if form.cap is None else form.cap
    options = dataclasses.replace(options, logits_soft_cap=cap, score_mod=None)
    return options, scoring._replace(alibi_slopes=form.slopes)


def check_qkv(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    q, k, v = [float_array(name, x, "seq, heads, head_dim", 3) for name, x in (("q", q), ("k", k), ("v", v))]
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v: expected one dtype, received {q.dtype}, {k.dtype}, {v.dtype}; cast them to the same dtype."
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v: expected the shape of k except for the last axis, {k.shape[:-1]}, received {v.shape[:-1]}."
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"k: expected the leading axes of q, {q.shape[:-3]}, received {k.shape[:-3]}; broadcast it or use jax.vmap."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k: expected the head_dim of q, {q.shape[-1]}, received {k.shape[-1]} in shape {k.shape}."
        )
    if q.shape[-1] == 0 or q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q: expected the number of query heads to be a multiple of the {k.shape[-2]} key heads, received {q.shape[-2]} in shape {q.shape}; "
            "the layout is [..., seq, heads, head_dim]."
        )
    return q, k, v


def visible(given: MaskInputs, q_shape: tuple[int, ...], keys: int) -> Lowered:
    """What all masks of a call leave visible."""
    lead, queries, heads, mask = q_shape[:-3], q_shape[-3], q_shape[-2], given.own
    _check_exclusive(given, lead)
    if isinstance(given.mask, Mask):
        mask = mask & _check_mask(given.mask, lead, queries, keys)
    elif given.mask is not None:
        mask = mask & Mask.from_dense(given.mask)
    check_axes("mask", mask.dense, lead)
    if (segments := segments_of(given, queries, keys)) is not None:
        mask = mask & Mask(segments=(segments,))
    if given.cu_seqlens is not None:
        mask = mask & _cu_seqlens(given, queries, keys)
    if given.q_lengths is not None or given.kv_lengths is not None:
        mask = mask & Mask(
            q_lengths=_lengths("q_lengths", given.q_lengths, lead, queries),
            kv_lengths=_lengths("kv_lengths", given.kv_lengths, lead, keys),
        )
    offset = None if given.q_offset is None else _offset(given.q_offset, lead)
    return lower(mask, queries, keys, offset, heads)


def _check_exclusive(given: MaskInputs, lead: tuple[int, ...]) -> None:
    packed = given.cu_seqlens is not None or (
        isinstance(given.mask, Mask) and given.mask.cu_seqlens is not None
    )
    for name in ("segment_ids", "q_lengths", "kv_lengths", "q_offset"):
        if packed and getattr(given, name) is not None:
            raise ValueError(
                f"{name}: expected None with cu_seqlens, received both; cu_seqlens already defines where sequences begin and end."
            )
    if given.kv_cu_seqlens is not None and given.cu_seqlens is None:
        raise ValueError(
            "cu_seqlens: expected the offsets of the queries, received only kv_cu_seqlens; pass both."
        )
    if packed and lead:
        raise ValueError(
            f"cu_seqlens: expected q of shape [tokens, heads, head_dim], received leading axes {lead}; flatten them or use segment_ids."
        )


def _check_mask(mask: Mask, lead: tuple[int, ...], queries: int, keys: int) -> Mask:
    for q_ids, kv_ids in mask.segments:
        if q_ids.shape[-1:] != (queries,) or kv_ids.shape[-1:] != (keys,):
            raise ValueError(
                f"mask: expected segment ids for {queries} queries and {keys} keys, received {q_ids.shape} and {kv_ids.shape}; "
                "pass both to Mask.from_segments."
            )
    check_axes("mask", mask.dense, lead)
    for name in ("prefix_lengths", "windows", "chunks"):
        for x in jax.tree.leaves(getattr(mask, name)):
            _row_scalar(f"mask.{name}", x, lead)
    cu_seqlens = mask.cu_seqlens
    if cu_seqlens is not None:
        q, kv = cu_seqlens
        q = check_offsets("mask.cu_seqlens", q, q, queries)
        cu_seqlens = q, check_offsets("mask.kv_cu_seqlens", kv, kv, keys)
    inner = lambda masks: tuple(_check_mask(part, lead, queries, keys) for part in masks)
    return dataclasses.replace(
        mask,
        unions=tuple(map(inner, mask.unions)),
        complements=inner(mask.complements),
        q_lengths=_lengths("mask.q_lengths", mask.q_lengths, lead, queries),
        kv_lengths=_lengths("mask.kv_lengths", mask.kv_lengths, lead, keys),
        cu_seqlens=cu_seqlens,
    )


def _cu_seqlens(given: MaskInputs, queries: int, keys: int) -> Mask:
    of_keys = given.cu_seqlens if given.kv_cu_seqlens is None else given.kv_cu_seqlens
    q, kv = jnp.asarray(given.cu_seqlens), jnp.asarray(of_keys)
    for name, value in (("cu_seqlens", q), ("kv_cu_seqlens", kv)):
        if value.ndim != 1 or value.shape[0] < 2 or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                f"{name}: expected int offsets [N + 1] from 0 to the number of tokens, received {value.dtype} {value.shape}."
            )
    if q.shape != kv.shape:
        raise ValueError(
            f"kv_cu_seqlens: expected the same number of sequences as cu_seqlens, {q.shape}, received {kv.shape}."
        )
    _check_both("kv_cu_seqlens: expected offsets", queries, keys, given.kv_cu_seqlens)
    q = check_offsets("cu_seqlens", q.astype(jnp.int32), given.cu_seqlens, queries)
    kv = check_offsets("kv_cu_seqlens", kv.astype(jnp.int32), of_keys, keys)
    return Mask.from_cu_seqlens(q, kv)


def segments_of(given: MaskInputs, queries: int, keys: int) -> tuple[Array, Array] | None:
    """The segment ids of queries and keys, if they are given; one array if they are the same."""
    if given.segment_ids is None and given.kv_segment_ids is None:
        return None
    if given.segment_ids is None:
        raise ValueError("segment_ids: expected ids of the queries, received only kv_segment_ids; pass both.")
    ids = _segment_ids("segment_ids", given.segment_ids, queries)
    _check_both("kv_segment_ids: expected ids", queries, keys, given.kv_segment_ids)
    same = given.kv_segment_ids is None
    return ids, ids if same else _segment_ids("kv_segment_ids", given.kv_segment_ids, keys)


def _check_both(expected: str, queries: int, keys: int, of_keys: Any) -> None:
    """Refuses to take for the keys what belongs to another number of queries."""
    if of_keys is None and queries != keys:
        raise ValueError(
            f"{expected} for {keys} keys, since their number differs from the {queries} queries, received None; pass both."
        )


def _segment_ids(name: str, value: Any, length: int) -> Array:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim < 1 or array.shape[-1] != length:
        raise ValueError(f"{name}: expected ints [..., {length}], received {array.dtype} {array.shape}.")
    return check_int32(name, array.astype(jnp.int32), value)


def _lengths(name: str, value: Any, lead: tuple[int, ...], most: int) -> Array | None:
    array = _row_scalar(name, value, lead)
    if array is None:
        return None
    return check_between(name, array, value, 0, most, f"there are {most}, including padding")


def _row_scalar(name: str, value: Any, lead: tuple[int, ...]) -> Any:
    if value is None:
        return None
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name}: expected ints, one per batch row {lead} or a scalar, received dtype {array.dtype}."
        )
    return _broadcastable(name, array, lead).astype(jnp.int32)


def _offset(q_offset: Any, lead: tuple[int, ...]) -> Any:
    fixed = isinstance(q_offset, int | np.integer)
    array = jnp.zeros((), jnp.int32) if fixed else _row_scalar("q_offset", q_offset, lead)
    array = check_between("q_offset", array, q_offset, -FAR, FAR, "query positions count from the first key")
    return int(q_offset) if fixed else array


def _broadcastable(name: str, array: Array, full: tuple[int, ...]) -> Array:
    padded = (1,) * (len(full) - array.ndim) + array.shape
    if len(padded) != len(full) or any(
        size not in (1, whole) for size, whole in zip(padded, full, strict=True)
    ):
        raise ValueError(f"{name}: expected a shape broadcastable to {full}, received {array.shape}.")
    return array


def _pad_lead(array: Array, lead: tuple[int, ...], rank: int) -> Array:
    """Prepends axes of size one, so that the array has as many leading axes as the queries."""
    return array.reshape((1,) * (len(lead) + rank - array.ndim) + array.shape)


def spread(name: str, array: Array | None, lead: tuple[int, ...], *core: int) -> Array | None:
    """The array, broadcastable to `[*lead, *core]`, with all leading axes of the queries."""
    if array is None:
        return None
    return _pad_lead(_broadcastable(name, array, (*lead, *core)), lead, len(core))


def check_axes(name: str, array: Any, lead: tuple[int, ...]) -> None:
    """Refuses `[x, T, S]` beside queries of a batch, whose sizes alone would decide whether `x` is the batch or the heads."""
    if lead and array is not None and array.ndim == 3:
        raise ValueError(
            f"{name}: expected [..., H, T, S] with an axis of the heads, or [T, S], beside q with leading axes {lead}, received {array.shape}. "
            f"Its first axis may be rows or heads: pass {name}[:, None] for rows, {name}[None] for heads."
        )


def bias_of(value: Any, lead: tuple[int, ...]) -> Array | None:
    array = None if value is None else jnp.asarray(value)
    check_axes("bias", array, lead)
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"bias: expected floats, received dtype {array.dtype}; pass a boolean array as mask=."
        )
    return array


def _per_head(name: str, value: Any, q: Any, *forms: str) -> Array | None:
    """One number per head, in float32 or wider. Several of one head join the denominator as their log-sum-exp."""
    if value is None:
        return None
    array, heads = jnp.asarray(value), q.shape[-2]
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim not in range(1, len(forms) + 1) or array.shape[0] != heads or not is_float:
        raise ValueError(
            f"{name}: expected floats {' or '.join(forms)}, received {array.dtype} {array.shape}."
        )
    if array.ndim > 1:
        array = jax.nn.logsumexp(array.astype(jnp.promote_types(array.dtype, jnp.float32)), axis=1)
    return spread(name, array.astype(accumulator(q.dtype)), q.shape[:-3], heads)


def _seeds(key: Any, lead: tuple[int, ...], heads: int) -> Array:
    if key is None:
        raise ValueError(
            "key: expected a JAX PRNG key because dropout_rate > 0, received None; pass key=, or inference=True to disable dropout."
        )
    return jax.random.bits(key, (*lead, heads, 2), jnp.uint32)
