"""New plans for the kernels of a pytree: `replan` and `with_config`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._kernel import Kernel, make_plan, Plan, with_plan
from .processes import replan_together


def map_plans(function: Callable[[str, Plan], Plan], tree: Any) -> Any:
    """A copy of a pytree in which every kernel, including kernels inside kernels, has the plan `function(path, its plan)`."""

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        inside = lambda child: isinstance(child, Kernel) and child is not node
        below = lambda rest, child: visit((*path, *rest), child) if inside(child) else child
        copy = jax.tree_util.tree_map_with_path(below, node, is_leaf=inside)
        if not isinstance(node, Kernel):
            return copy
        return with_plan(copy, function(jax.tree_util.keystr(path), node.plan))

    return visit((), tree)


def plans_of(tree: Any) -> dict[str, Plan]:
    """The plan of every kernel in a pytree, including kernels inside kernels, by path."""
    plans: dict[str, Plan] = {}

    def note(path: str, plan: Plan) -> Plan:
        plans[path] = plan
        return plan

    map_plans(note, tree)
    return plans


def renew_plans(trees: tuple[Any, ...], renew: Callable[[list[Plan]], Plan | None]) -> tuple[Any, ...]:
    """Copies of the pytrees in which `renew` replaces the plans with equal requests by one plan, so that trees that matched before still do;
    `None` leaves them unchanged."""
    alike: dict[Any, list[Plan]] = {}
    for tree in trees:
        for plan in plans_of(tree).values():
            alike.setdefault(plan.request, []).append(plan)
    renewed = {request: renew(plans) for request, plans in alike.items()}
    return tuple(map_plans(lambda _, plan: renewed[plan.request] or plan, tree) for tree in trees)


def _replanned(plans: list[Plan]) -> Plan | None:
    """A plan with everything known now, or `None` if every plan would already choose the same, so that compiled functions are kept."""
    new = plans[0].renewed()
    same = new.request == plans[0].request and all(plan.answers == new.answers for plan in plans)
    return None if same and len(set(plans)) == 1 else new.as_edition()


def replan(model: Any, *others: Any) -> Any:
    """Returns the model with every kernel's choices renewed, for this device and from the current tables.

    Use it after loading a model on another device, or after another process has tuned. Explicit choices (`platform=`,
    `config=`) are kept, and nothing is timed.

    **Arguments:**

    - `model`: any pytree that contains kernels.
    - `others`: pytrees that must keep matching it, such as the state of an optimiser.

    **Returns:**

    The model; with `others`, the tuple `(model, *others)`. With several processes, all must call it, and all use the tables of process 0.
    """
    trees = (model, *others)
    replan_together({plan.operation for tree in trees for plan in plans_of(tree).values()})
    new = renew_plans(trees, _replanned)
    return new if others else new[0]


def with_config(model: Any, configs: Mapping[str, Any], *others: Any) -> Any:
    """Returns the model with some kernels changed as if they had been built with `config=`.

    ```python
    model = ejx.with_config(model, {".layers[0].attention": config})
    model, state = ejx.with_config(model, {"flash_attention": config}, state)
    ```

    **Arguments:**

    - `model`: any pytree that contains kernels.
    - `configs`: maps kernel paths, as shown by `ejx.explain(model)`, to configurations. A name of an operation stands
        for all its kernels that are not listed by path. `None` removes a fixed configuration.
    - `others`: pytrees with copies of the model, such as the state of an optimiser, to be changed in the same way.

    **Returns:**

    The model; with `others`, the tuple `(model, *others)`. Raises `ValueError` for an unknown path or operation, and for a configuration of
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
    """The plan of every path with `configs` applied."""
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
    """`tree` with the parts that contain the model's kernels changed like the model."""
    result = False

    def is_copy(node: Any) -> bool:
        return plans_of(node) == plans

    def change(node: Any) -> Any:
        nonlocal result
        if not is_copy(node):
            return node
        result = True
        return map_plans(lambda path, _: chosen[path], node)

    changed = jax.tree.map(change, tree, is_leaf=is_copy)
    if plans and plans_of(tree) and not result:
        raise ValueError(
            f"others[{index}]: expected a pytree with a copy of the model's kernels {sorted(plans)} in it, received one with the kernels "
            f"{sorted(plans_of(tree))}; pass it as it was created from this model."
        )
    return changed


def with_kernel_config(kernel: Any, config: Any | None) -> Any:
    """A kernel as if it had been built with `config=`; the kernel itself if that is `None`."""
    if config is None:
        return kernel
    return with_plan(kernel, _configured(kernel.operation, kernel.plan, config))
