"""The family's one kind of call, for `core/`."""

from typing import Any

from ..core import Kind
from . import reference
from .problems import problem_of
from .spec import LEARNED, LETTERS, NativeArrays, NativeSpec, RESULTS, SAVED


def _saved(platform: Any, arrays: NativeArrays, spec: NativeSpec) -> dict[str, tuple[str, ...]]:
    return {name: axes for name, axes in LETTERS.axes_of(arrays).items() if name in SAVED}


ATTEND = Kind(
    make=NativeArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.attend,
    results=RESULTS,
    learned=LEARNED,
    saved_of=_saved,
    read=("indices",),
    wanted=lambda spec: ("out",) if spec.given else RESULTS,
    # The gradient reads the blocks that were chosen, too.
    names={"out": "native_sparse_out", "indices": "native_sparse_saved", "saved": "native_sparse_saved"},
    remedy="No platform has forward mode for it; use jax.grad or jax.vjp.",
)
