"""The benchmark of block-sparse attention runs, checks before it times, and writes what it says."""

import numpy as np

from benchmarks import sparse


def test_what_is_visible_is_counted():
    """Pairs and tiles, against the whole mask."""
    for problem in sparse.PROBLEMS["tiny"]:
        index = np.arange(problem.S)
        seen = np.broadcast_to(sparse.sees(problem, index[:, None], index), (problem.S,) * 2)
        pairs, tiles = sparse.visible(problem)
        assert pairs == seen.mean()
        padded = np.pad(seen, (0, -problem.S % sparse.BLOCK))
        count = padded.reshape(problem.blocks, sparse.BLOCK, problem.blocks, -1).any((1, 3)).mean()
        assert tiles == count, problem
    for problem in sparse.PROBLEMS["anchors"]:
        if problem.share:
            assert abs(sparse.block_map(problem).mean() - problem.share) < 0.01
