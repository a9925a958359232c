"""Block-sparse attention in PyTorch: `flex_attention`, compiled."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.linear_peers import missing, Peer
from benchmarks.sparse_problems import BLOCK, FORMS, SparseProblem, table_of

Tensors = dict[str, Any]


@functools.cache
def _compiled() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(problem: SparseProblem) -> Callable[[Tensors], Any]:
    """The mask of blocks is made once, outside the measured time."""

    @functools.cache
    def block_mask() -> Any:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        torch.compiler.reset()  # after eight other masks it would not compile this one
        table = table_of(problem)
        tensor = None if table is None else torch.from_numpy(table).cuda()

        def visible(batch: Any, head: Any, q: Any, k: Any) -> Any:
            return FORMS[problem.form].sees(problem, tensor, q, k)

        return create_block_mask(visible, None, None, problem.S, problem.S, device="cuda", BLOCK_SIZE=BLOCK)

    def run(tensors: Tensors) -> Any:
        q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
        grouped = problem.H != problem.kv_heads
        return _compiled()(q, k, v, block_mask=block_mask(), enable_gqa=grouped).transpose(1, 2)

    return run


def peers_of(problem: SparseProblem) -> Iterator[Peer]:
    """The installed peers."""
    if "torch" not in missing():
        yield Peer("flex_attention", "torch", _flex(problem))
