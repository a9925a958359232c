"""The kinds of calls whose kernels have no backward: steps, whose gradient is that of the reference, and calls for inference, which have none."""

import dataclasses
import functools
from typing import Any

import jax

from .._errors import UnsupportedError
from .._kernel import Plan
from ..dispatch import Platform, Selection
from ..dispatch.labels import kernel_scope
from ..parallel import match_varying
from .kind import Call, is_opaque, Kind, Named


class StepKind(Kind):
    """A kind whose kernels have no backward: one token per row. Its gradient is that of the reference."""

    def differentiates(self, platform: Any) -> bool:
        return not is_opaque(platform)

    def has_backward(self, platform: Any) -> bool:
        return False

    def plainly(self, platform: Any, arrays: Any, spec: Any, config: Any) -> Any:
        return platform.step(arrays, spec, config)

    def forward(self, platform: Any, arrays: Any, spec: Any, config: Any, save: bool) -> Named:
        return self.by_name(platform.step(arrays, spec, config))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ForwardKind(Kind):
    """A kind without a gradient, for inference: `forward(arrays, spec, config)` on every platform.

    - `refusal`: why there is none, and the remedy.
    """

    refusal: tuple[str, str]

    def _on(self, plan: Plan, spec: Any, finite: bool, selection: Selection, given: Named) -> Named:
        implementation = selection.implementation.load()

        def forward(arrays: Any, spec: Any, config: Any, rest: Named) -> Named:
            return self.by_name(implementation.forward(arrays, spec, config))

        def plainly(given: Named) -> Named:
            with kernel_scope(selection):
                return forward(self.make(**given), spec, selection.config, {})

        call, operation = plainly, selection.problem.operation
        if is_opaque(implementation):
            call = functools.partial(self._launcher(plan, selection, spec), forward)
            given = match_varying(given, given)
        results = self.refused(operation, selection.platform, call)(given)
        return {name: results[name] for name in (self.wanted(spec) if self.wanted else self.results)}

    def refused(self, operation: str, platform: Platform, function: Call) -> Call:
        """The function, with a clear error if it is differentiated."""
        call, (reason, remedy) = jax.custom_jvp(function), self.refusal

        @call.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise UnsupportedError(operation, {platform: reason}, remedy)

        return call
