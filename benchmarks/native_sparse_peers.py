"""flash-linear-attention's native sparse attention, and the compilation of its kernels in several processes.

Its kernels have about sixty configurations between them, which its search compiles one after the other when a kernel first runs: over two minutes
with a gradient. Triton keeps compiled kernels on disk, so processes that each run a share of the configurations, on few tokens, leave little to do.
"""

import argparse
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

TOKENS = 1024


def attend(x: dict[str, Any], block: int, count: int, window: int) -> Any:
    """`parallel_nsa`, with a window only if flash-attn is installed, which it needs for one."""
    from fla.ops.nsa import parallel_nsa

    gates = dict(zip(("g_cmp", "g_slc", "g_swa"), x["gates"].unbind(-1)))
    return parallel_nsa(
        x["q"], x["k"], x["v"], **gates, block_counts=count, block_size=block, window_size=window
    )


def has_window() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def compile_ahead(processes: int, sizes: Sequence[int]) -> None:
    """Compiles the kernels of calls with these sizes: heads, key heads, channels, tokens of a block, blocks and window."""
    start = time.monotonic()
    shares = [
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(n), str(processes), *map(str, sizes)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for n in range(processes)
    ]
    failed = [n for n, share in enumerate(shares) if share.wait()]
    said = f", but for the shares {failed}" if failed else ""
    print(f"compiled flash-linear-attention's kernels in {time.monotonic() - start:.0f} s{said}", flush=True)


def _run_share(number: int, shares: int, sizes: Sequence[int]) -> None:
    """Runs forward and backward where every search has only each of so many of its configurations, from this number on."""
    import fla.ops.nsa  # noqa: F401  # defines the kernels
    import torch
    from triton.runtime.autotuner import Autotuner

    for search in [x for x in gc.get_objects() if isinstance(x, Autotuner)]:
        search.configs = search.configs[number::shares] or search.configs[:1]
    heads, kv_heads, channels, block, count, window = sizes
    random = lambda *shape: torch.randn(
        1, TOKENS, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    x = {"q": random(heads, channels), "k": random(kv_heads, channels), "v": random(kv_heads, channels)}
    out = attend(x | {"gates": random(heads, 3)}, block, count, window)
    out.sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("numbers", type=int, nargs=8)
    share, of, *rest = made.parse_args().numbers
    _run_share(share, of, rest)
