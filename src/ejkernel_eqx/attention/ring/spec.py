"""The static half of a call whose tokens are split over a mesh axis."""

import dataclasses
from typing import Any, Literal

from ..spec import AttentionSpec

Order = Literal["contiguous", "zigzag"]
CHUNKS = {"contiguous": 1, "zigzag": 2}
"""The number of chunks of consecutive tokens that each device has, by order."""
Method = Literal["ring", "all_to_all"]
Reach = tuple[int | None, int | None, int]
"""Keys visible to the left and right of a query, and the position of the first query among the keys."""


@dataclasses.dataclass(frozen=True)
class RingSpec(AttentionSpec):
    """A call over all tokens, of which each device has a part. Window, offset and `AttentionArrays.rows` are those of the whole sequence in
    its temporal order; all other arrays are the device's own, in the order in which it has its tokens."""

    axis: str = ""
    order: Order = "contiguous"
    method: Method | None = None
    reach: Reach = (None, None, 0)
    """No key outside of it is visible, although `rows` may hide more."""

    slopes: bool = False
    """Whether ALiBi slopes are given."""

    def piece(self, left: int | None, right: int | None, offset: int, same_segments: bool) -> AttentionSpec:
        """The spec of a kernel's call for some of the queries and keys."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(AttentionSpec)
        }
        same = same_segments and self.same_segments
        fields |= {"left": left, "right": right, "offset": offset, "same_segments": same, "return_lse": True}
        return AttentionSpec(**fields)

    def plain(self) -> AttentionSpec:
        """The same call on one device, which has all tokens."""
        return self.piece(self.left, self.right, self.offset, True)
