"""New plans for the kernels of a pytree: `replan` and `with_config`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._kernel import Kernel, make_plan, Plan, with_plan
from .processes import replan_together


def map_plans(function: Callable[[str, Plan], Plan], tree: Any) -> Any:
    """A copy of a pytree in which every kernel, also one inside another kernel, has the plan `function(path, its plan)`."""

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        inside = lambda child: isinstance(child, Kernel) and child is not node
        below = lambda rest, child: visit((*path, *rest), child) if inside(child) else child
        copy = jax.tree_util.tree_map_with_path(below, node, is_leaf=inside)
        if not isinstance(node, Kernel):
            return copy
        return with_plan(copy, function(jax.tree_util.keystr(path), node.plan))

    return visit((), tree)


def plans_of(tree: Any) -> dict[str, Plan]:
    """The plan of every kernel in a pytree, by path; kernels inside kernels included."""
    plans: dict[str, Plan] = {}

    def note(path: str, plan: Plan) -> Plan:
        plans[path] = plan
        return plan

    map_plans(note, tree)
    return plans


def renew_plans(trees: tuple[Any, ...], renew: Callable[[list[Plan]], Plan | None]) -> tuple[Any, ...]:
    """Copies of the pytrees in which `renew` has a plan for all that were asked for alike, so that what matched before still does;
    `None` leaves them as they are."""
    alike: dict[Any, list[Plan]] = {}
    for tree in trees:
        for plan in plans_of(tree).values():
            alike.setdefault(plan.request, []).append(plan)
    renewed = {request: renew(plans) for request, plans in alike.items()}
    return tuple(map_plans(lambda _, plan: renewed[plan.request] or plan, tree) for tree in trees)


def _replanned(plans: list[Plan]) -> Plan | None:
    """Everything known now; nothing where every plan would choose so already: what is compiled then stays."""
    new = plans[0].renewed()
    same = new.request == plans[0].request and all(plan.answers == new.answers for plan in plans)
    return None if same and len(set(plans)) == 1 else new.as_edition()


def replan(model: Any, *others: Any) -> Any:
    """The model with every kernel's choices made anew: for this device, from the tables as they now stand.

    After loading a model on another device, or after another process has tuned. What a kernel was built with (`platform=`,
    `config=`) stays; nothing is timed.

    **Arguments:**

    - `model`: any pytree that holds kernels.
    - `others`: pytrees that must go on matching it, such as the state of an optimiser.

    **Returns:**

    The model; with `others`, the tuple `(model, *others)`. With several processes all must call it: all take the tables of process 0.
    """
    trees = (model, *others)
    replan_together({plan.operation for tree in trees for plan in plans_of(tree).values()})
    new = renew_plans(trees, _replanned)
    return new if others else new[0]


def with_config(model: Any, configs: Mapping[str, Any], *others: Any) -> Any:
    """The model with some kernels as if they had been built with `config=`.

    ```python
    model = ejx.with_config(model, {".layers[0].attention": config})
    model, state = ejx.with_config(model, {"flash_attention": config}, state)
    ```

    **Arguments:**

    - `model`: any pytree that holds kernels.
    - `configs`: a kernel's path, as `ejx.explain(model)` shows it, or the name of an operation (every kernel of it that is not named by
        its path) to a configuration; `None` takes a configuration given before away.
    - `others`: pytrees with copies of the model in them, such as the state of an optimiser, to be changed alike.

    **Returns:**

    The model; with `others`, the tuple `(model, *others)`. `ValueError` for a path or operation that is not there and for a configuration of
    another kernel.
    """
    plans = plans_of(model)
    chosen = _assign(configs, plans)
    new = (
        map_plans(lambda path, _: chosen[path], model),
        *(_like_model(tree, i, plans, chosen) for i, tree in enumerate(others)),
    )
    return new if others else new[0]


def _assign(configs: Mapping[str, Any], plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The plan of every path after `configs`."""
    operations = {plan.operation for plan in plans.values()}
    unknown = [name for name in configs if name not in plans and name not in operations]
    if unknown:
        raise ValueError(
            f"configs: expected a path of {sorted(plans)} or an operation of {sorted(operations)}, received {unknown[0]!r}; "
            "ejx.explain(model) shows the paths."
        )
    chosen = dict(plans)
    for path, plan in plans.items():
        name = path if path in configs else plan.operation
        if name in configs:
            chosen[path] = _configured(path or plan.operation, plan, configs[name])
    return chosen


def _configured(path: str, plan: Plan, config: Any) -> Plan:
    try:
        return make_plan(plan.operation, platform=plan.snapshot.requested, config=config)
    except ValueError as error:
        raise ValueError(f"configs[{path!r}]: {error}") from error


def _like_model(tree: Any, index: int, plans: Mapping[str, Plan], chosen: Mapping[str, Plan]) -> Any:
    """`tree` with the parts that have the model's kernels changed as the model is."""
    found = False

    def is_copy(node: Any) -> bool:
        return plans_of(node) == plans

    def change(node: Any) -> Any:
        nonlocal found
        if not is_copy(node):
            return node
        found = True
        return map_plans(lambda path, _: chosen[path], node)

    changed = jax.tree.map(change, tree, is_leaf=is_copy)
    if plans and plans_of(tree) and not found:
        raise ValueError(
            f"others[{index}]: expected a pytree with a copy of the model's kernels {sorted(plans)} in it, received one with the kernels "
            f"{sorted(plans_of(tree))}; give it as it was made from this model."
        )
    return changed


def with_kernel_config(kernel: Any, config: Any | None) -> Any:
    """A kernel as if it had been built with `config=`; itself where there is none."""
    if config is None:
        return kernel
    return with_plan(kernel, _configured(kernel.operation, kernel.plan, config))
