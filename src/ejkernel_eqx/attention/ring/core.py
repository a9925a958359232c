"""The family's kind of call with tokens split over a mesh axis: one kernel's call for each device, folded and split as a whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import lax

from ...core.kind import Named
from ...dispatch import Problem, Selection
from ...parallel import given_of
from ..core import ATTEND, AttentionKind, axes_of, OUT_NAME, problem_of
from ..spec import AttentionArrays
from . import exchange, rotation
from .method import method_of
from .spec import RingSpec

_FORMS = {"ring": rotation, "all_to_all": exchange}
_OWN = "own "
"""Before the names of arrays as the kernel of a device reads them."""


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
        if (form := _form(arrays, spec)) is None:
            results, own = super().forward(platform, arrays, spec.plain(), config, save), {}
        else:
            out, lse, own = form.forward(platform, arrays, spec, config)
            results = {"out": out, "lse": lse}
        if save:
            own = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "out": results["out"]} | own
            results |= {f"{_OWN}{name}": x for name, x in own.items()}
        return results

    def backward(
        self, platform: Any, arrays: Any, spec: Any, config: Any, saved: Named, cotangents: Named
    ) -> Named:
        if (form := _form(arrays, spec)) is None:
            return super().backward(platform, arrays, spec.plain(), config, saved, cotangents)
        own = {name.removeprefix(_OWN): x for name, x in saved.items() if name.startswith(_OWN)}
        results = [state[name] for state in (saved, cotangents) for name in ("out", "lse")]
        return given_of(form.backward(platform, arrays, spec, config, own, *results))


def _form(arrays: AttentionArrays, spec: RingSpec) -> Any:
    """The form of a call on one device; `None` if no other device has any of the tokens."""
    devices = _devices(spec)
    return None if devices == 1 else _FORMS[method_of(arrays, spec, devices)[0]]


def _saved_of(platform: Any, arrays: AttentionArrays, spec: RingSpec) -> dict[str, tuple[str, ...]]:
    """What a form keeps of queries, keys, values and outputs: as many numbers on each device as it has of the arrays themselves."""
    axes = _axes_of(arrays)
    return {f"{_OWN}{name}": axes[name] for name in ("q", "k", "v", "out")}


ATTEND_RING = RingKind(
    **vars(ATTEND)
    | {"problem_of": _problem_of, "axes_of": _axes_of, "saved_of": _saved_of}
    | {"names": dict(ATTEND.names) | {f"saved {_OWN}out": OUT_NAME}}
)
