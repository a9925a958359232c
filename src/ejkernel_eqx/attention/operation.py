"""The options that operations of softmax attention share, and how these enter a call."""

from typing import Any

import equinox as eqx

from .._kernel import Kernel, Plan
from ..core.plans import plan_of
from .arguments import MaskInputs, parse_window, ScoreOptions
from .masks.mask import Mask, Window


class Windowed(Kernel):
    """Softmax attention with a window, options of its scores, and dropout outside inference."""

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

    def _masking(self, *hidden: Any) -> MaskInputs:
        """What a call hides, whose first fields these are, and the module's own options, which are one more condition."""
        return MaskInputs(*hidden, Mask(is_causal=self.causal, window=self.window))

    def _infers(self, inference: bool | None) -> Any:
        """Whether a call is one of inference; `None` stands for false."""
        return self.inference if inference is None else inference
