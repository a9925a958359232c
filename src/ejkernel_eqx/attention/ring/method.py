"""Defines which of the two forms runs: keys round the ring, or heads for tokens."""

from ..spec import AttentionArrays
from .spec import Method, RingSpec

HIDDEN = 4096
"""From as many queries for each key (a device's tokens times the query heads of a key head), a hop in 16 bits takes less time than the
products of its step: 500 TFLOP/s by 141 GB/s, as measured between two H200."""


def method_of(arrays: AttentionArrays, spec: RingSpec, devices: int) -> tuple[Method, str]:
    """The form of a call with these local shapes, and why."""
    method, why = _method_and_why(arrays, spec, exchange_unsupported(arrays, devices))
    return method, f"{method.replace('_', '-')} over {devices} devices of axis {spec.axis!r}{why}"


def _method_and_why(arrays: AttentionArrays, spec: RingSpec, against: str | None) -> tuple[Method, str]:
    """The form; `against`: why heads cannot be exchanged for tokens."""
    if spec.method == "all_to_all" and against is not None:
        raise ValueError(
            f"method: expected a call that all_to_all supports, but {against}; use method='ring'."
        )
    if spec.method is not None:
        return spec.method, ", as requested"
    if against is not None:
        return "ring", f": all-to-all does not support the call, since {against}"
    left, right, _ = spec.reach
    if left is not None and right is not None:
        return "ring", ": the window reaches few devices"
    queries = arrays.q.shape[1] * arrays.q.shape[2] // arrays.k.shape[2]
    if queries < HIDDEN:
        return "all_to_all", f": {queries} queries for each key are too few to hide a hop of the ring"
    if right is not None and spec.order == "contiguous":
        return "all_to_all", ": in contiguous order a causal ring waits for its last device"
    return "ring", f": its hops are hidden behind {queries} queries for each key"


def exchange_unsupported(arrays: AttentionArrays, devices: int) -> str | None:
    """The reason why heads cannot be exchanged for tokens; `None` if they can."""
    heads, kv_heads = arrays.q.shape[2], arrays.k.shape[2]
    if heads % devices or (kv_heads % devices and devices % kv_heads):
        return f"{heads} query and {kv_heads} key heads cannot be split over {devices} devices"
    for name, x in (("bias", arrays.bias), ("mask", arrays.mask)):
        if x is not None and x.shape[2] > 1:
            return f"a {name} with a row for each query would have to be gathered"
    return None
