"""`tune`: a whole model in one call; `autotune`: one module's call."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._errors import TuningError
from .._kernel import Inputs, make_plan, Plan
from ..dispatch import current_policy, device_fingerprint, kernel_registry, Policy, stable_json, Tier
from ..dispatch.known import Key, Known
from ..dispatch.overlay import POLICY_VARIABLE
from .options import current_options, TuneOptions
from .processes import Round, share, taking_part
from .recording import Invocation, invocations_of
from .replace import plans_of, renew_plans
from .summary import Summary
from .tracing import refuse_trace
from .tuner import answer, has_choice, tuned_results

_LOG = logging.getLogger("ejkernel_eqx")
_GIVEN = (Tier.OVERRIDE, Tier.OVERLAY)  # the user's own choices


def tune(
    model: Any,
    *args: Any,
    call: Callable[..., Any] | None = None,
    others: Any | None = None,
    options: TuneOptions | None = None,
    force: bool = False,
    **kwargs: Any,
) -> Any:
    """Tunes every kernel that a call of a model uses, and returns the model with the winning configurations.

    ```python
    model = ejx.tune(model, x)
    model, opt_state = ejx.tune(model, x, key=key, others=opt_state)
    model = ejx.tune(model, batch, call=lambda model, batch: loss(model, *batch))
    ```

    The call is traced with shapes only. Every distinct problem in it is tuned once, forward and backward together,
    unless a table already contains it. Each candidate is checked against the reference, forward and backward, and the
    winner is written to the user's table, where later processes find it. Explicit choices (`config=`, an overlay) are
    left unchanged. One line per tuned problem and a summary are logged at level INFO. If that level is off, the summary
    goes to standard error beside the progress bar.

    **Arguments:**

    - `model`: a pytree with kernels anywhere in it: in modules, dicts, lists, stacked layers.
    - `args`, `kwargs`: arguments of `call` besides the model: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. On several
        devices, kernels see the shapes that one device holds: pass those, or a call that uses `jax.shard_map`.
    - `call`: called as `call(model, *args, **kwargs)`; default `model(*args, **kwargs)`. Pass it if the model is called in another way, for
        example one example at a time under `jax.vmap`.
    - `others`: a pytree with copies of the model's kernels, such as the state of an optimiser, that must keep matching the model.
    - `options`: [`ejkernel_eqx.TuneOptions`][], such as the time budget per problem.
    - `force`: also tune problems that tables already contain.

    **Returns:**

    The model; with `others`, the tuple `(model, others)`. Arrays are unchanged. With several processes
    (`jax.process_count() > 1`) every process must make this call. Process 0 tunes, all receive its table, and all
    verify that they will run the same configurations.

    Raises `TuningError` under the policy `"heuristic"`, inside `jit` or another staged transformation, if no
    configuration of a kernel passes its check, or if another process fails. Raises `ValueError` for a `model` that is
    not callable, without `call`. Exceptions of the call itself propagate.
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
    """Tunes one module for one call. [`ejkernel_eqx.tune`][] does the same for a whole model.

    **Arguments:**

    - `kernel`: an operation, such as `ejx.FlashAttention()`.
    - `args`, `kwargs`: the arguments of its call: arrays or `jax.ShapeDtypeStruct`s.
    - `configs`: configurations to try instead of the platform's own candidates. The heuristic and any previous winner compete with
        them.
    - `options`, `force`: as for `ejx.tune`.

    **Returns:**

    The module with the fastest correct configuration. Raises the errors of `ejx.tune`, and `ValueError` for `configs` of another kernel.
    """
    with taking_part("ejx.autotune") as together:
        _check_open(kernel)
        tuning = Tuning(together, options, force, configs)
        (new,) = tuning.tune_trees((kernel,), lambda kernel: invocations_of(kernel, Inputs(args, kwargs)))
    return new


def tune_invocations(
    invocations: Iterable[Invocation], *, options: TuneOptions | None = None, force: bool = False
) -> tuple[Invocation, ...]:
    """Tunes recorded invocations, each distinct problem once, and returns them with the choices made from now on."""
    asked = tuple(invocations)
    with taking_part("ejx.autotune_recorded") as together:
        tuning = Tuning(together, options, force)
        tuning.answer(asked)
        tuning.log()
        now = tuple(_now(invocation) for invocation in asked)
        together.agree(_statement(now))
    return now


class Tuning:
    """One tuning request, and what it has found so far (`table`)."""

    def __init__(
        self, together: Round, options: TuneOptions | None, force: bool, configs: Sequence[Any] | None = None
    ) -> None:
        refuse_trace(together.name)
        if not isinstance(options, TuneOptions | None):
            raise ValueError(
                f"options: expected an ejx.TuneOptions, received {options!r}; pass for example options=ejx.TuneOptions(time_budget=20)."
            )
        self._policy = Policy.FORCE if force else current_policy()
        if current_policy() is Policy.HEURISTIC:
            raise TuningError(
                f"{together.name}: the policy 'heuristic' forbids tuning; exit policy_override(\"heuristic\") or unset the "
                f"environment variable {POLICY_VARIABLE}."
            )
        self.table: dict[Key, Known] = {}
        self._asked: dict[Key, Invocation] = {}
        self._together = together
        self._options = options or current_options()
        self._configs = configs
        self._start, self._before = time.monotonic(), len(tuned_results())

    def tune_trees(
        self, trees: tuple[Any, ...], invocations: Callable[[Any], list[Invocation]]
    ) -> tuple[Any, ...]:
        """The trees with every problem of the first one tuned. `invocations(tree)` traces a tree."""
        # An operation's function makes its kernel at each call.
        makes_its_own = getattr(trees[0], "operation", None) in kernel_registry.list_operations()
        if not plans_of(trees[0]) and not makes_its_own:
            _LOG.warning(
                "%s: the model contains no kernel and is returned unchanged; kernels captured by a function or held in a "
                "static field are not part of it.",
                self._together.name,
            )
        new = renew_plans(trees, self._renew)
        calls = invocations(new[0])
        # A problem whose configurations are all denied goes to the next platform and is tuned there.
        while self.answer(calls):
            new = renew_plans(trees, self._renew)
            calls = invocations(new[0])
        self._together.agree(_statement(calls))
        self._warn_of_captured(calls)
        self.log()
        return new

    def answer(self, calls: Iterable[Invocation]) -> bool:
        """Tunes the new problems of these calls; returns whether there were any."""
        tunable: dict[Key, Invocation] = {}
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
            len(tunable) * 2 * (self._options.time_budget + self._options.candidate_timeout)
            + self._options.lock_timeout,
        )
        return True

    def _tune_all(self, calls: Iterable[Invocation]) -> dict[Key, Known]:
        """The tuner's results for calls that tables do not cover."""
        how = {"configs": self._configs, "options": self._options, "force": self._policy is Policy.FORCE}
        open_calls = [call for call in calls if self._configs is not None or not self._suffices(call)]
        return {_question(call): answer(call.problem, call.implementation, **how) for call in open_calls}

    def _suffices(self, call: Invocation) -> bool:
        """Tells whether the tables that the policy trusts contain exactly this problem."""
        snapshot = make_plan(call.operation, platform=call.platform).here
        local = {**snapshot.memory, **snapshot.user}
        trusted = {Policy.CACHED: {**snapshot.shipped, **local}, Policy.TUNE: local}
        return _question(call) in trusted.get(self._policy, {})

    def _renew(self, plans: list[Plan]) -> Plan | None:
        """The plan with everything known now, and the choices for the requested problems pinned; the user's choices are kept."""
        plan = plans[0]
        if plan.snapshot.override is not None:
            return None
        new = _keep_overlay(plan.renewed(), plan)
        if {other.edition for other in plans} != {""}:
            new = new.as_edition()
        pins = {}
        for (platform, key), call in sorted(self._asked.items(), key=lambda asked: asked[0]):
            if platform in new.platforms and call.operation == plan.operation:
                tuned = self.table.get((platform, key))
                known = (tuned, Tier.AUTOTUNE) if tuned else new.here.known_exactly(platform, key)
                pins |= {(platform, key): known} if known else {}
        return new.with_pins(pins)

    def _warn_of_captured(self, calls: Iterable[Invocation]) -> None:
        for call in calls:
            tuned = self.table.get(_question(call))
            if call.tier not in _GIVEN and tuned is not None and tuned.config not in (None, call.config):
                _LOG.warning(
                    "%s: %s was tuned for %s, but belongs to a kernel outside the model's pytree (captured by a function or held in a "
                    "static field), whose plan is unchanged; it will use %r when it is rebuilt.",
                    self._together.name,
                    call.operation,
                    call.problem,
                    tuned.config,
                )

    def log(self) -> None:
        """Reports a summary."""
        summary = Summary.of(
            tuned_results()[self._before :],
            problems=len(self._asked),
            only=sum(
                not has_choice(call.problem, call.implementation, self._configs, self._options)
                for call in self._asked.values()
            ),
            failed=sum(known.config is None for known in self.table.values()),
            seconds=time.monotonic() - self._start,
        )
        summary.tell(self._together.name, self._options.progress)


def _keep_overlay(new: Plan, old: Plan) -> Plan:
    """The new plan with the overlays under which the old one was built, which may be closed by now."""
    overlay = tuple(dict.fromkeys((*new.snapshot.overlay, *old.snapshot.overlay)))
    if overlay == new.snapshot.overlay:
        return new
    return new.changed(lambda known: dataclasses.replace(known, overlay=overlay))


def _question(call: Invocation) -> Key:
    return call.platform, call.problem.key()


def _now(call: Invocation) -> Invocation:
    """The invocation with the choice that is made now."""
    if call.tier in _GIVEN:
        return call
    return Invocation.of(make_plan(call.operation, platform=call.platform).select(call.problem))


def _statement(calls: Iterable[Invocation]) -> str:
    """States what calls will run, in a form that can be compared between processes."""
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
            f"model: expected a callable module, received {type(model).__name__}; specify how it is called with call=: "
            "ejx.tune(model, x, call=lambda model, x: ...)."
        )
    return lambda model, *args, **kwargs: model(*args, **kwargs)


def _check_open(kernel: Any) -> None:
    for plan in plans_of(kernel).values():
        if plan.snapshot.override is not None:
            raise ValueError(
                f"kernel: expected a module without a fixed configuration, received a {plan.operation} built with config={plan.snapshot.override!r}; "
                f"ejx.with_config(kernel, {{{plan.operation!r}: None}}) removes it."
            )
