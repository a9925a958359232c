"""The one list of attention problems: tests of every platform, benchmarks and the tuner's checks draw on it."""

import dataclasses
import itertools
import zlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from tests.attention.inner import AttentionArrays, AttentionSpec, RowRanges, visibility, XlaConfig, XlaTile


def xla_tiles(block_q: int, block_k: int) -> XlaConfig:
    """The same tiles forward and backward."""
    return XlaConfig(XlaTile(block_q, block_k), XlaTile(block_q, block_k))


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. A broadcast pattern is written with the letters of the axes, `1` where broadcast: `"1HTS"`."""

    name: str = "plain"
    B: int = 2
    T: int = 64
    S: int = 64
    H: int = 4
    K: int = 2
    D: int = 64
    V: int = 64
    left: int | None = None
    right: int | None = None
    offset: int = 0
    soft_cap: float | None = None
    bias: str | None = None
    alibi: str | None = None
    sinks: str | None = None
    mask: str | None = None
    segments: bool = False
    rows: str | None = None  # "lengths", "packed" or "scattered"
    dropout: float = 0.0
    dtype: str = "float32"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            scale=self.D**-0.5,
            logits_soft_cap=self.soft_cap,
            left=self.left,
            right=self.right,
            offset=self.offset,
            dropout_rate=self.dropout,
        )

    def shape(self, pattern: str) -> tuple[int, ...]:
        return tuple(1 if letter == "1" else getattr(self, letter) for letter in pattern)


def make(case: Case, seed: int = 0) -> tuple[AttentionArrays, AttentionSpec]:
    """The problem's arrays, the same for the same case and seed."""
    rng = np.random.default_rng([seed, zlib.crc32(repr(case).encode())])
    heads = jnp.float64 if case.dtype == "float64" else jnp.float32

    def normal(pattern: str | None, dtype, scale: float = 1.0):
        if pattern is None:
            return None
        return jnp.asarray((scale * rng.standard_normal(case.shape(pattern))).astype(dtype), dtype)

    q, k, v = (normal(pattern, case.dtype) for pattern in ("BTHD", "BSKD", "BSKV"))
    assert q is not None and k is not None and v is not None
    mask = None if case.mask is None else jnp.asarray(rng.random(case.shape(case.mask)) < 0.7)
    q_segments, kv_segments = _segments(case) if case.segments else (None, None)
    seeds = jnp.asarray(rng.integers(0, 2**32, case.shape("BH") + (2,), np.uint32)) if case.dropout else None
    arrays = AttentionArrays(
        q=q,
        k=k,
        v=v,
        bias=normal(case.bias, case.dtype),
        alibi_slopes=normal(case.alibi, heads, 0.05),
        sinks=normal(case.sinks, heads),
        mask=mask,
        q_segments=q_segments,
        kv_segments=kv_segments,
        rows=None if case.rows is None else _rows(case, rng),
        seeds=seeds,
    )
    return arrays, case.spec


def _segments(case: Case):
    """Three documents and a padded tail; the keys' ids are shared by the batch, the queries' shift from row to row."""
    queries = 3 * np.arange(case.T)[None] // max(case.T, 1) + np.arange(case.B)[:, None]
    keys = 3 * np.arange(case.S)[None] // max(case.S, 1)
    queries[:, case.T - case.T // 8 :] = -1
    keys[:, case.S - case.S // 8 :] = -1
    return jnp.asarray(queries, jnp.int32), jnp.asarray(keys, jnp.int32)


def _rows(case: Case, rng: np.random.Generator) -> RowRanges:
    t, s = np.arange(case.T), case.S
    if case.rows == "lengths":  # A prefix of the keys for each batch row; the last row has none.
        lengths = np.array([s * (case.B - 1 - b) // max(case.B - 1, 1) for b in range(case.B)])[:, None]
        lengths = lengths if case.B > 1 else np.full((1, 1), s - s // 3)
        end = np.broadcast_to(lengths, (case.B, case.T))
        start, position = np.zeros_like(end), end - case.T + t
    elif case.rows == "packed":  # Causal documents, shared by the batch, then padding.
        stop = (min(case.T, s) * 7) // 8
        document = np.searchsorted([stop // 4, stop // 2], t, side="right")
        start = np.array([0, stop // 4, stop // 2])[document][None]
        end, position = np.where(t < stop, t + 1, start), t[None]
    elif case.rows == "scattered":  # Any range at all, some empty; no query sees the first key nor the last.
        low, high = (1, max(s - 1, 1))
        start = rng.integers(low, high + 1, (case.B, case.T))
        end = np.minimum(rng.integers(0, high + 1, (case.B, case.T)) + s // 3, high)
        position = rng.integers(0, s + 1, (case.B, case.T))
    else:
        raise ValueError(f"unknown pattern of rows {case.rows!r}")
    return RowRanges(*(jnp.asarray(x, jnp.int32) for x in (start, end, position)))


def poison(case: Case, arrays: AttentionArrays) -> AttentionArrays:
    """NaN in every key hidden by the window, the ranges or the segments, and in every query that sees nothing."""
    spec = case.spec
    blind = ~visibility(arrays, spec).any(3).swapaxes(1, 2)[..., None]
    key_hidden = ~visibility(arrays._replace(mask=None, q_segments=None, kv_segments=None), spec)
    key_hidden = key_hidden.all((1, 2))[:, :, None, None]
    if arrays.kv_segments is not None:
        key_hidden |= (arrays.kv_segments < 0)[:, :, None, None]
    nan = jnp.asarray(np.nan, arrays.q.dtype)
    return arrays._replace(
        q=jnp.where(blind, nan, arrays.q),
        k=jnp.where(key_hidden, nan, arrays.k),
        v=jnp.where(key_hidden, nan, arrays.v),
    )


def all_pairs(factors: Sequence[int], forbidden=lambda row: False) -> list[tuple[int, ...]]:
    """Rows of choices, one per factor, such that every allowed pair of choices of two factors is in some row.

    Greedy and deterministic: each row starts from the first uncovered pair and takes, factor by factor, the choice that
    covers most. `forbidden` sees a row in which `None` stands for what is not chosen yet.
    """
    indices = range(len(factors))
    open_pairs = {
        (a, x, b, y): None
        for a, b in itertools.combinations(indices, 2)
        for x, y in itertools.product(range(factors[a]), range(factors[b]))
        if not forbidden([x if i == a else y if i == b else None for i in indices])
    }
    rows = []
    while open_pairs:
        a, x, b, y = next(iter(open_pairs))
        row: list = [x if i == a else y if i == b else None for i in indices]
        for c in sorted((c for c in indices if row[c] is None), key=lambda c: -factors[c]):
            row[c] = _best_choice(row, c, factors[c], open_pairs, forbidden, len(rows))
        for i, j in itertools.combinations(indices, 2):
            open_pairs.pop((i, row[i], j, row[j]), None)
        rows.append(tuple(row))
    return rows


def _best_choice(row, column, choices, open_pairs, forbidden, turn):
    """The choice for `column` that covers most open pairs with what is chosen; ties turn, so that none is favoured."""

    def gain(z):
        pairs = (
            (i, w, column, z) if i < column else (column, z, i, w) for i, w in enumerate(row) if w is not None
        )
        return sum(pair in open_pairs for pair in pairs)

    allowed = [
        z for z in range(choices) if not forbidden([z if i == column else w for i, w in enumerate(row)])
    ]
    return max(allowed, key=lambda z: (gain(z), -((z - turn) % choices)))


_WINDOWS = (
    dict(),
    dict(right=0, offset=None),  # causal, bottom-right: offset S - T
    dict(right=0),  # causal, top-left
    dict(left=9, right=0, offset=None),
    dict(left=5, right=17, offset=-3),
    dict(left=30, offset=4),
)
_FLAGS: dict[str, tuple] = {
    "window": _WINDOWS,
    "bias": (None, "BHTS", "1HTS", "B1T1", "1H1S", "1111"),
    "mask": (None, "BHTS", "11TS", "B11S"),
    "rows": (None, "lengths", "packed", "scattered"),
    "heads": ((2, 2), (4, 2), (3, 1), (8, 1)),
    "alibi": (None, "1H", "BH"),
    "sinks": (None, "1H", "BH"),
    "dtype": ("float32", "bfloat16", "float16"),
    "segments": (False, True),
    "dropout": (0.0, 0.3),
    "soft_cap": (None, 3.0),
    "B": (1, 2),
}
_LENGTHS = (
    (127, 127),
    (7, 65),
    (64, 64),
    (200, 63),
    (1, 127),
    (65, 200),
    (63, 7),
    (127, 64),
    (1, 1),
    (65, 65),
    (200, 200),
)
_DIMS = (
    (64, 64),
    (16, 16),
    (128, 128),
    (40, 40),
    (192, 128),
    (80, 80),
    (256, 256),
    (96, 96),
    (160, 160),
    (16, 40),
)


def _forbidden(row) -> bool:
    """Ranges of rows replace the window."""
    chosen = dict(zip(_FLAGS, row, strict=True))
    return bool(chosen["window"]) and bool(chosen["rows"])


def _cases(rows: list[tuple[int, ...]]) -> list[Case]:
    cases = []
    for n, row in enumerate(rows):
        flags = {name: choices[i] for (name, choices), i in zip(_FLAGS.items(), row, strict=True)}
        t, s = _LENGTHS[n % len(_LENGTHS)]
        d, v = _DIMS[n % len(_DIMS)]
        (heads, kv_heads), window = flags.pop("heads"), dict(flags.pop("window"))
        if "offset" in window and window["offset"] is None:
            window["offset"] = s - t
        case = Case(T=t, S=s, D=d, V=v, H=heads, K=kv_heads, **window, **flags)
        cases.append(dataclasses.replace(case, name=f"{n:02d}-{_describe(case)}"))
    return cases


def _on_and_off() -> list[tuple[int, ...]]:
    """Every pair of flags off, on, and one of each; what is on takes its values in turn."""
    counts = [len(choices) - 1 for choices in _FLAGS.values()]
    turns = [itertools.cycle(range(1, count + 1)) for count in counts]
    rows = all_pairs([2] * len(counts), _forbidden)
    return [tuple(next(turn) if on else 0 for on, turn in zip(row, turns, strict=True)) for row in rows]


def _describe(case: Case) -> str:
    words = [f"B{case.B}T{case.T}S{case.S}H{case.H}K{case.K}D{case.D}V{case.V}", case.dtype]
    words += [
        f"{n}{getattr(case, n)}" for n in ("left", "right", "offset") if getattr(case, n) not in (None, 0)
    ]
    words += ["causal"] if case.right == 0 else []
    words += [
        f"{n}_{getattr(case, n)}" for n in ("bias", "mask", "rows", "alibi", "sinks") if getattr(case, n)
    ]
    words += [n for n in ("segments", "dropout", "soft_cap") if getattr(case, n)]
    return "-".join(words)


PLAIN = Case()
EVERYTHING = Case(
    name="everything", T=65, S=127, H=6, K=2, D=40, V=24, right=0, left=50, offset=62, soft_cap=3.0, bias="1HTS",
    alibi="1H", sinks="1H", mask="B1TS", segments=True, dropout=0.2,
)  # fmt: skip
EMPTY = (
    Case(name="no-queries", T=0, sinks="1H", bias="1HTS", alibi="1H"),
    Case(name="no-keys", S=0, sinks="1H", bias="1HTS", alibi="1H"),
    Case(name="no-keys-no-sinks", S=0),
    Case(name="window-sees-nothing", right=0, offset=-200, sinks="BH"),
)
PAIRWISE = _cases(all_pairs([len(choices) for choices in _FLAGS.values()], _forbidden))
CASES = [PLAIN, EVERYTHING, *PAIRWISE]
COVERING = _cases(_on_and_off())
