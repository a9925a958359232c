"""`tune`: a whole model in one call; `autotune`: one module's call."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._errors import TuningError
from .._inputs import Inputs
from .._kernel import make_plan, Plan
from ..dispatch import (
    current_policy,
    device_fingerprint,
    kernel_registry,
    Platform,
    Policy,
    stable_json,
    Tier,
)
from ..dispatch.overlay import POLICY_VARIABLE
from .options import current_options, TuneOptions
from .processes import Round, share, Table, taking_part
from .recording import Invocation, invocations_of
from .replace import plans_of, renew_plans
from .summary import Summary
from .tracing import refuse_trace
from .tuner import answer, tuned_results

_LOG = logging.getLogger("ejkernel_eqx")
_GIVEN = (Tier.OVERRIDE, Tier.OVERLAY)  # the user's own choices
Question = tuple[Platform, str]


def tune(
    model: Any,
    *args: Any,
    call: Callable[..., Any] | None = None,
    others: Any | None = None,
    options: TuneOptions | None = None,
    force: bool = False,
    **kwargs: Any,
) -> Any:
    """Tunes every kernel that one call of a model uses, and gives the model with the winners in place.

    ```python
    model = ejx.tune(model, x)
    model, opt_state = ejx.tune(model, x, key=key, others=opt_state)
    model = ejx.tune(model, batch, call=lambda model, batch: loss(model, *batch))
    ```

    The call is traced with shapes only. Every distinct problem in it is tuned once, forward and backward together, unless a table knows it
    already: each candidate is checked against the reference before it may win, and the winner is written into the user's table, where
    the next process finds it. Choices that were given (`config=`, an overlay) are left alone. A line for each problem that was tuned is
    logged at the level INFO, and at the end a summary; where that level is off, the summary goes to standard error beside the progress bar.

    **Arguments:**

    - `model`: a pytree that holds kernels anywhere: in modules, dicts, lists, stacked layers.
    - `args`, `kwargs`: what `call` is given besides the model: arrays or `jax.ShapeDtypeStruct`s, or pytrees with any of them. On several
        devices, kernels see the shapes that one device holds: give those, or a call that uses `jax.shard_map`.
    - `call`: `call(model, *args, **kwargs)`; default `model(*args, **kwargs)`. Give it where the model is called in another way, for example
        one example at a time under `jax.vmap`.
    - `others`: a pytree with copies of the model's kernels in it, such as the state of an optimiser, that must go on matching the model.
    - `options`: [`ejkernel_eqx.TuneOptions`][]: the seconds for each problem and the like.
    - `force`: tune anew what is known, too.

    **Returns:**

    The model; with `others`, the tuple `(model, others)`. Arrays are untouched. With several processes (`jax.process_count() > 1`) every process must
    make this call: process 0 tunes, all get its table, and all make sure that they will run the same.

    `TuningError` under the policy `"heuristic"`, inside `jit` or another staged transformation, if no configuration of a kernel
    survives its check, or if another process fails. `ValueError` for a `model` that cannot be called without `call`. What the call itself
    raises is passed on.
    """
    with taking_part("ejx.tune") as together:
        function = _call_of(model, call)
        tuning = Tuning(together, options, force)
        new, new_others = tuning.tune_trees(
            (model, others), lambda model: invocations_of(function, Inputs((model, *args), kwargs))
        )
    return new if others is None else (new, new_others)


def autotune(
    kernel: Any,
    *args: Any,
    configs: Sequence[Any] | None = None,
    options: TuneOptions | None = None,
    force: bool = False,
    **kwargs: Any,
) -> Any:
    """One module with the fastest correct configuration for one call. [`ejkernel_eqx.tune`][] does so for a whole model.

    **Arguments:**

    - `kernel`: an operation, such as `ejx.FlashAttention()`.
    - `args`, `kwargs`: its call: arrays or `jax.ShapeDtypeStruct`s.
    - `configs`: the configurations to try, in place of the platform's own candidates. The heuristic, and what has won before, compete with
        them.
    - `options`, `force`: as for `ejx.tune`.

    **Returns:**

    The module. Errors as for `ejx.tune`; `ValueError` for `configs` of another kernel.
    """
    with taking_part("ejx.autotune") as together:
        _check_open(kernel)
        tuning = Tuning(together, options, force, configs)
        (new,) = tuning.tune_trees((kernel,), lambda kernel: invocations_of(kernel, Inputs(args, kwargs)))
    return new


def tune_invocations(
    invocations: Iterable[Invocation], *, options: TuneOptions | None = None, force: bool = False
) -> tuple[Invocation, ...]:
    """Tunes what was recorded, each distinct problem once, and gives it with what is chosen from now on."""
    asked = tuple(invocations)
    with taking_part("ejx.autotune_recorded") as together:
        tuning = Tuning(together, options, force)
        tuning.answer(asked)
        tuning.log()
        now = tuple(_now(invocation) for invocation in asked)
        together.agree(_statement(now))
    return now


class Tuning:
    """One request to tune: what it asks for, and what it has found so far (`table`)."""

    def __init__(
        self,
        together: Round,
        options: TuneOptions | None,
        force: bool,
        configs: Sequence[Any] | None = None,
    ) -> None:
        refuse_trace(together.name)
        if not isinstance(options, TuneOptions | None):
            raise ValueError(
                f"options: expected an ejx.TuneOptions, received {options!r}; write options=ejx.TuneOptions(time_budget=20)."
            )
        self._policy = Policy.FORCE if force else current_policy()
        if current_policy() is Policy.HEURISTIC:
            raise TuningError(
                f"{together.name}: the policy 'heuristic' forbids tuning; leave policy_override(\"heuristic\") or unset the "
                f"environment variable {POLICY_VARIABLE}."
            )
        self.table: Table = {}
        self._asked: dict[Question, Invocation] = {}
        self._together = together
        self._options = options or current_options()
        self._configs = configs
        self._start, self._before = time.monotonic(), len(tuned_results())

    def tune_trees(
        self, trees: tuple[Any, ...], invocations: Callable[[Any], list[Invocation]]
    ) -> tuple[Any, ...]:
        """The trees with every problem tuned that the first one asks for. `invocations(tree)` traces it."""
        if not plans_of(trees[0]) and not _builds_its_own(trees[0]):
            _LOG.warning(
                "%s: there is no kernel in the model, which is returned unchanged; a kernel that a function captures or that stands in a "
                "static field is no part of it.",
                self._together.name,
            )
        new = renew_plans(trees, self._renew)
        calls = invocations(new[0])
        # A problem whose every configuration is denied goes to the next platform, and is tuned there.
        while self.answer(calls):
            new = renew_plans(trees, self._renew)
            calls = invocations(new[0])
        self._together.agree(_statement(calls))
        self._warn_of_captured(calls)
        self.log()
        return new

    def answer(self, calls: Iterable[Invocation]) -> bool:
        """Tunes what these calls ask for and no calls before did; whether there was anything."""
        tunable: dict[Question, Invocation] = {}
        for call in calls:
            is_new = call.tier not in _GIVEN and _question(call) not in self._asked | tunable
            if is_new and call.implementation.make_workload(call.problem):
                tunable[_question(call)] = call
        self._asked |= tunable
        if not tunable:
            return False
        self.table |= share(
            self._together,
            {call.operation for call in tunable.values()},
            stable_json([device_fingerprint(), self._policy.value, sorted(tunable)]),
            lambda: self._tune_all(tunable.values()),
            len(tunable) * 2 * (self._options.time_budget + self._options.candidate_timeout),
        )
        return True

    def _tune_all(self, calls: Iterable[Invocation]) -> Table:
        """What the tuner says, where the tables do not suffice."""
        how = {"configs": self._configs, "options": self._options, "force": self._policy is Policy.FORCE}
        open_calls = [call for call in calls if self._configs is not None or not self._suffices(call)]
        return {_question(call): answer(call.problem, call.implementation, **how) for call in open_calls}

    def _suffices(self, call: Invocation) -> bool:
        """Whether the tables that the policy trusts know exactly this problem."""
        snapshot = make_plan(call.operation, platform=call.platform).here
        own = snapshot.memory_table | snapshot.user_table
        trusted = {Policy.CACHED: snapshot.shipped_table | own, Policy.TUNE: own}
        return _question(call) in trusted.get(self._policy, {})

    def _renew(self, plans: list[Plan]) -> Plan | None:
        """The plan with all that is known now and what was asked for pinned, tuned or known before; what the user gave stays."""
        plan = plans[0]
        if plan.snapshot.override is not None:
            return None
        new = _keep_overlay(plan.renewed(), plan)
        if {other.edition for other in plans} != {""}:
            new = new.as_edition()
        pins = []
        for (platform, key), call in sorted(self._asked.items(), key=lambda asked: asked[0]):
            if platform in new.platforms and call.operation == plan.operation:
                tuned = self.table.get((platform, key))
                known = (tuned, Tier.AUTOTUNE) if tuned else new.here.known_exactly(platform, key)
                pins.extend([((platform, key, known[0]), known[1])] if known else [])
        return new.with_pins([pin for pin, _ in pins], [tier for _, tier in pins])

    def _warn_of_captured(self, calls: Iterable[Invocation]) -> None:
        for call in calls:
            tuned = self.table.get(_question(call))
            if call.tier not in _GIVEN and tuned is not None and tuned.config not in (None, call.config):
                _LOG.warning(
                    "%s: %s was tuned for %s, but is asked by a kernel that is no part of the model's pytree (a function captures it, or it "
                    "stands in a static field), whose plan stays as it is; it gets %r when it is built anew.",
                    self._together.name,
                    call.operation,
                    call.problem,
                    tuned.config,
                )

    def log(self) -> None:
        """What was done."""
        summary = Summary.of(
            tuned_results()[self._before :],
            problems=len(self._asked),
            failed=sum(known.config is None for known in self.table.values()),
            seconds=time.monotonic() - self._start,
        )
        summary.tell(self._together.name, self._options.progress)


def _keep_overlay(new: Plan, old: Plan) -> Plan:
    """The new plan with the overlays that the old one was built under, which may be closed by now."""
    overlay = tuple(dict.fromkeys((*new.snapshot.overlay, *old.snapshot.overlay)))
    if overlay == new.snapshot.overlay:
        return new
    return new.changed(lambda known: dataclasses.replace(known, overlay=overlay))


def _question(call: Invocation) -> Question:
    return call.platform, call.problem.key()


def _now(call: Invocation) -> Invocation:
    """A choice as it is made now."""
    if call.tier in _GIVEN:
        return call
    return Invocation.of(make_plan(call.operation, platform=call.platform).select(call.problem))


def _statement(calls: Iterable[Invocation]) -> str:
    """What calls will run, in a form that processes can compare."""
    return stable_json(
        sorted([stable_json(c.problem.to_dict()), c.platform.value, stable_json(c.config)] for c in calls)
    )


def _call_of(model: Any, call: Callable[..., Any] | None) -> Callable[..., Any]:
    if call is not None:
        if callable(call):
            return call
        raise ValueError(f"call: expected a function call(model, *args, **kwargs), received {call!r}.")
    if not callable(model):
        raise ValueError(
            f"model: expected a callable module, received {type(model).__name__}; say by call= how it is called: "
            "ejx.tune(model, x, call=lambda model, x: ...)."
        )
    return lambda model, *args, **kwargs: model(*args, **kwargs)


def _builds_its_own(model: Any) -> bool:
    """Whether it is an operation's function, which makes its kernel at each call and finds what was tuned."""
    return getattr(model, "operation", None) in kernel_registry.list_operations()


def _check_open(kernel: Any) -> None:
    for plan in plans_of(kernel).values():
        if plan.snapshot.override is not None:
            raise ValueError(
                f"kernel: expected a module whose configuration is open, received a {plan.operation} built with config={plan.snapshot.override!r}; "
                f"ejx.with_config(kernel, {{{plan.operation!r}: None}}) takes that away."
            )
