"""The tiles that queries and keys are cut into, and the kinds of them."""

from typing import NamedTuple

NONE, PARTIAL, FULL = 0, 1, 2


class Shape(NamedTuple):
    """Queries, keys, and the tiles that they are cut into. `by_key`: lists are those of key tiles, and bits are stored key by key."""

    queries: int
    keys: int
    block_q: int
    block_k: int
    by_key: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """The number of query tiles and of key tiles."""
        return -(-self.queries // self.block_q), -(-self.keys // self.block_k)
