"""The family's kind of call with tokens split over a mesh axis: one kernel's call for each device, folded and split as a whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import lax

from ...core.kind import Named
from ...dispatch import Problem, Selection
from ..core import ATTEND, AttentionKind, axes_of, problem_of
from ..spec import AttentionArrays, AttentionSpec
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
        platform, spec = _form(platform, arrays, spec)
        return super().forward(platform, arrays, spec, config, save)

    def backward(self, platform: Any, arrays: Any, spec: Any, *others: Any) -> Named:
        platform, spec = _form(platform, arrays, spec)
        return super().backward(platform, arrays, spec, *others)


class _OnDevices(NamedTuple):
    """A form of the call, as a platform that runs the kernels of another one."""

    form: Any
    platform: Any

    def forward(self, *call: Any) -> Any:
        return self.form.forward(self.platform, *call)

    def backward(self, *call: Any) -> Any:
        return self.form.backward(self.platform, *call)


def _form(platform: Any, arrays: AttentionArrays, spec: RingSpec) -> tuple[Any, AttentionSpec]:
    """The platform of a call on one device, and its spec: those of attention if no other device has any of the tokens."""
    devices = _devices(spec)
    if devices == 1:
        return platform, spec.plain()
    return _OnDevices(_FORMS[method_of(arrays, spec, devices)[0]], platform), spec


ATTEND_RING = RingKind(**vars(ATTEND) | {"problem_of": _problem_of, "axes_of": _axes_of})
