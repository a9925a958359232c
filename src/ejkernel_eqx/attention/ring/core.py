"""The family's kind of call with tokens split over a mesh axis: one kernel's call for each device, folded and split as a whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import Array, lax

from ..._kernel import Plan
from ...core.kind import Named
from ...dispatch import Problem, Selection
from ..core import ATTEND, AttentionKind, axes_of, problem_of
from ..spec import AttentionArrays
from . import exchange, rotation
from .method import method_of
from .spec import RingSpec

_FORMS = {"ring": rotation, "all_to_all": exchange}


def _problem_of(operation: str, arrays: AttentionArrays, spec: RingSpec) -> Problem:
    """That of one device's queries and keys, aligned as in self-attention."""
    offset = 0 if arrays.rows is not None else arrays.k.shape[-3] - arrays.q.shape[-3]
    return problem_of(operation, arrays, spec.piece(spec.left, spec.right, offset, True))


def _axes_of(arrays: AttentionArrays, spec: Any = None) -> dict[str, tuple[str, ...]]:
    """As of attention, but ranges stay whole on every device, and so do the keys of arrays over the scores."""
    axes = axes_of(arrays)
    whole = {name: ("every_T",) for name in axes if name.startswith("rows.")}
    scores = {name: (*axes[name][:2], "every_S") for name in ("bias", "mask")}
    return axes | whole | scores


def _devices(spec: RingSpec) -> int:
    """The number of devices share the tokens here; one if the axis is not bound, because there are no others or the call is not split yet."""
    if not spec.axis:
        return 1
    try:
        return lax.axis_size(spec.axis)
    except NameError:
        return 1


class RingKind(AttentionKind):
    def is_launched(self, platform: Any) -> bool:
        return True

    def pinned(self, spec: RingSpec) -> Mapping[str, str]:
        return {"T": spec.axis, "S": spec.axis} if spec.axis else {}

    def remarked(self, selection: Selection, arrays: AttentionArrays, spec: RingSpec) -> Selection:
        devices = _devices(spec)
        if devices == 1:
            return selection
        return dataclasses.replace(selection, remarks=(method_of(arrays, spec, devices)[1],))

    def forward(self, platform: Any, arrays: Any, spec: Any, config: Any, save: bool) -> Named:
        devices = _devices(spec)
        if devices == 1:
            return super().forward(platform, arrays, spec.plain(), config, save)
        form = _FORMS[method_of(arrays, spec, devices)[0]]
        return dict(zip(self.results, form.forward(arrays, spec, config, platform), strict=True))

    def backward(
        self,
        platform: Any,
        arrays: Any,
        spec: Any,
        config: Any,
        saved: Named,
        cotangents: Named,
    ) -> Named:
        devices = _devices(spec)
        if devices == 1:
            return super().backward(platform, arrays, spec.plain(), config, saved, cotangents)
        form = _FORMS[method_of(arrays, spec, devices)[0]]
        results = (saved["out"], saved["lse"], cotangents["out"], cotangents["lse"])
        grads = form.backward(arrays, spec, config, platform, *results)
        return {name: x for name, x in grads._asdict().items() if x is not None}


ATTEND_RING = RingKind(
    **{field.name: getattr(ATTEND, field.name) for field in dataclasses.fields(ATTEND)}
    | {"problem_of": _problem_of, "axes_of": _axes_of}
)


def attend(plan: Plan, operation: str, arrays: AttentionArrays, spec: RingSpec) -> tuple[Array, Array | None]:
    """`out [..., T, H, V]` and `lse [..., H, T]`; `lse` is `None` unless it was requested."""
    results = ATTEND_RING.call(plan, operation, arrays, spec)
    return results["out"], results.get("lse")
