"""Problems of native sparse attention, and its results in numpy: used by the tests on a CPU and on a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from tests.attention.dense import exact, normal, quick

Named = dict[str, Any]
LEARNED = ("q", "k", "v", "gates", "compressed_k", "compressed_v")


@dataclasses.dataclass(frozen=True)
class Case:
    T: int = 37
    S: int | None = None
    B: int = 2
    H: int = 4
    K: int = 2
    D: int = 16
    V: int = 16
    block: int = 4
    count: int = 3
    window: int = 5
    span: int | None = None
    stride: int | None = None
    offsets: tuple[int, ...] | None = None
    q_offset: int | tuple[int, ...] | None = None
    means: bool = True  # compressed keys are means; else arrays of their own
    scale: float | None = None
    dtype: str = "float32"

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.offsets is not None else (self.B,)

    @property
    def keys(self) -> int:
        return self.S or self.T

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a compressed key, and between two."""
        span = self.span or self.block
        return span, self.stride or span

    def operation(self, platform: Any = None, config: Any = None) -> ejx.NativeSparseAttention:
        span, stride = self.sizes
        return ejx.NativeSparseAttention(
            self.block, self.count, self.window, compression_size=span, compression_stride=stride,
            softmax_scale=self.scale, platform=platform, config=config,
        )  # fmt: skip

    def others(self) -> Named:
        """The arguments that are not float."""
        found = {}
        if self.offsets is not None:
            found["cu_seqlens"] = jnp.array(self.offsets)
        if self.q_offset is not None:
            found["q_offset"] = self.q_offset if isinstance(self.q_offset, int) else jnp.array(self.q_offset)
        return found

    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """The position of each query among the keys and the first key of its sequence, `[*, T]`; position -1 for padding."""
        if self.offsets is None:
            offset = self.keys - self.T if self.q_offset is None else np.array(self.q_offset)
            place = np.broadcast_to(np.asarray(offset)[..., None] + np.arange(self.T), (*self.lead, self.T))
            return place, np.zeros_like(place)
        place, first = np.full(self.T, -1), np.zeros(self.T, int)
        for begin, end in zip(self.offsets, self.offsets[1:]):
            place[begin:end], first[begin:end] = np.arange(begin, end), begin
        return place, first

    def compressed(self) -> list[int]:
        """The first token of each compressed key; the rest of the axis is unused."""
        span, stride = self.sizes
        bounds = zip(self.offsets, self.offsets[1:]) if self.offsets else [(0, self.keys)]
        return [at for begin, end in bounds for at in range(begin, end - span + 1, stride)]


CASES = {
    "plain": Case(),
    "overlapping": Case(block=8, span=4, stride=2, scale=0.4),
    "long spans": Case(block=4, span=8, stride=4, H=3, K=1),
    "packed": Case(T=41, offsets=(2, 2, 13, 15, 38), H=6, V=8),
    "packed, overlapping": Case(T=41, offsets=(0, 20, 41), block=8, span=4, stride=2),
    "later queries": Case(T=5, S=37, K=4),
    "rows at places": Case(T=5, S=37, q_offset=(3, 30), D=12),
    "first queries": Case(T=9, S=20, q_offset=0, K=1),
    "learned": Case(T=21, means=False),
    "short": Case(T=3, K=1),
    "one block": Case(T=19, count=1, window=1),
    "uneven blocks": Case(T=23, block=6, count=2, V=20),
    "bf16": Case(dtype="bfloat16"),
    "f16": Case(dtype="float16", T=20, D=8),
}


def make(case: Case) -> tuple[Named, jax.Array]:
    """The arrays of a call, and a cotangent."""
    dtype = jnp.dtype(case.dtype)
    arrays = {
        "q": normal(0, *case.lead, case.T, case.H, case.D, dtype=dtype),
        "k": normal(1, *case.lead, case.keys, case.K, case.D, dtype=dtype),
        "v": normal(2, *case.lead, case.keys, case.K, case.V, dtype=dtype),
        "gates": jax.nn.sigmoid(normal(3, *case.lead, case.T, case.H, 3)),
    }
    if not case.means:
        count = len(case.compressed()) + 2  # a cache has room for more
        arrays["compressed_k"] = normal(4, *case.lead, count, case.K, case.D, dtype=dtype)
        arrays["compressed_v"] = normal(5, *case.lead, count, case.K, case.V, dtype=dtype)
    return arrays, normal(6, *case.lead, case.T, case.H, case.V, dtype=dtype)


def results(op: ejx.NativeSparseAttention, arrays: Named, others: Named, dout: Any) -> Named:
    """The output, the blocks and the gradients of all arrays."""

    def both(arrays: Named, others: Named, dout: Any) -> Named:
        call: Any = lambda arrays: op(**arrays, **others, return_indices=True)
        out, pull, indices = jax.vjp(call, arrays, has_aux=True)
        return {"out": out, "indices": indices, **pull(dout)[0]}

    static = {name: x for name, x in others.items() if isinstance(x, int)}
    rest = {name: x for name, x in others.items() if name not in static}
    return quick(lambda arrays, rest, dout: both(arrays, rest | static, dout))(arrays, rest, dout)


def by_hand(case: Case, arrays: Named, indices: Any, dout: Any) -> Named:
    """Output and gradients for given blocks, in numpy and float64; and the score of every block, `importance [*, T, K, M]`."""
    wide = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    gates, dout = wide.pop("gates"), np.asarray(dout).astype(np.float64)
    (place, first), (span, _) = case.starts(), case.sizes
    key, begins = np.arange(case.keys), case.compressed()
    token = [np.arange(at, at + span) for at in begins]
    if case.means:
        wide |= {f"compressed_{n}": np.stack([wide[n][..., t, :, :].mean(-3) for t in token], -3) if token
                 else np.zeros((*case.lead, 1, case.K, wide[n].shape[-1])) for n in "kv"}  # fmt: skip
    starts = np.full(wide["compressed_k"].shape[-3], 10**6)
    starts[: len(begins)] = begins
    seen = {
        "sliding": (key > place[..., None] - case.window)
        & (key <= place[..., None])
        & (key >= first[..., None]),
        "compressed": (starts + span - 1 <= place[..., None]) & (starts >= first[..., None]),
    }
    chosen = np.zeros((*case.lead, case.T, case.K, case.keys), bool)
    for n in range(np.shape(indices)[-1]):
        at = np.asarray(indices)[..., n, None]
        begin = first[..., None, None] + at * case.block
        chosen |= (at >= 0) & (begin <= key) & (key < begin + case.block) & (key <= place[..., None, None])
    masks = {name: x[..., None, :, :] for name, x in seen.items()}
    masks["selected"] = np.repeat(np.swapaxes(chosen, -2, -3), case.H // case.K, -3)
    found: Named = {name: np.zeros_like(x) for name, x in wide.items()} | {"out": 0.0}
    dgates = []
    for n, name in enumerate(("compressed", "selected", "sliding")):
        names = ("compressed_k", "compressed_v") if name == "compressed" else ("k", "v")
        call = {"q": wide["q"], "k": wide[names[0]], "v": wide[names[1]]}
        gate = np.where(np.swapaxes(masks[name].any(-1), -1, -2), gates[..., n], 0)[..., None]
        none = np.zeros(gate.shape[:-1])
        (out, _), grads = exact(call, dout * gate, none, masks[name], scale=case.scale)
        found["out"] = found["out"] + gate * out
        dgates.append((out * dout).sum(-1))
        for one, other in zip("qkv", ("q", *names)):
            found[other] += grads[one]
    found["gates"] = np.stack(dgates, -1)
    if case.means:
        for n in "kv":
            grad = found.pop(f"compressed_{n}")
            for c, at in enumerate(token):
                found[n][..., at, :, :] += grad[..., c, None, :, :] / span
    return found


def importance(case: Case, arrays: Named) -> np.ndarray:
    """The score of every block of a query's sequence, `[*, T, K, M]`, -inf for those after its own."""
    q = np.asarray(arrays["q"]).astype(np.float64)
    (place, first), (span, stride), begins = case.starts(), case.sizes, case.compressed()
    if "compressed_k" in arrays:
        k = np.asarray(arrays["compressed_k"]).astype(np.float64)[..., : len(begins), :, :]
    else:
        keys = np.asarray(arrays["k"]).astype(np.float64)
        k = (
            np.stack([keys[..., at : at + span, :, :].mean(-3) for at in begins], -3)
            .astype(arrays["k"].dtype)
            .astype(np.float64)
        )
    group = case.H // case.K
    scores = np.einsum("...thd,...chd->...thc", q, np.repeat(k, group, -2)) * (case.scale or case.D**-0.5)
    starts = np.array(begins)
    seen = ((starts + span - 1 <= place[..., None]) & (starts >= first[..., None]))[..., None, :]
    weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    weights = weights.reshape(*weights.shape[:-2], case.K, group, -1).sum(-2)
    blocks = -(-case.keys // case.block)
    found = np.full((*case.lead, case.T, case.K, blocks), -np.inf)
    for m in range(blocks):
        begin = first + m * case.block  # [*, T]
        # Each stride of a compressed key that lies in the block.
        strides = starts[:, None] + np.arange(0, span, stride)
        inside = (strides >= begin[..., None, None]) & (strides < begin[..., None, None] + case.block)
        score = (weights * inside.sum(-1)[..., None, :]).sum(-1)
        found[..., m] = np.where((begin <= place)[..., None], score, -np.inf)
    return found
