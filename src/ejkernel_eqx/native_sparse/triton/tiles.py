"""Tiles of the kernels, as configurations hold them."""

import dataclasses
from typing import Annotated

from ...launch.fields import Block, Checked, Count, Power, power_of_two, Registers, Rule, Warps
from ...paged.triton import compiled as pages

_power = power_of_two()
Tokens = Annotated[int, Rule(f"0 or {_power.words}", lambda x: x == 0 or _power.holds(x))]
_block = power_of_two(16)
Keys = Annotated[int, Rule(f"0 or {_block.words}", lambda x: x == 0 or _block.holds(x))]


@dataclasses.dataclass(frozen=True)
class RowTile(Checked):
    """A program has the heads of one group at one query."""

    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class ChosenTile(Checked):
    """A program has the heads of one group at one query, and up to `span` of its blocks."""

    span: Power
    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class ForwardTile(Checked):
    """A program has the heads of one group at one query, and up to `span` of its blocks; or, with `tokens`, a block of keys and up to `span` of the
    queries that chose it, `tokens` at a time. The kernel that then merges the results of blocks has up to `merge_registers` a thread, 0 for the
    compiler's choice."""

    tokens: Tokens
    span: Power
    num_warps: Warps
    num_stages: Count
    merge_registers: Registers = 0


@dataclasses.dataclass(frozen=True)
class KeyTile(Checked):
    """A program has a block of keys and up to `span` of the queries that chose it, `tokens` at a time."""

    tokens: Power
    span: Power
    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class SelectionTile(Checked):
    """A tile of the weights of compressed keys."""

    block_q: Block
    block_k: Block
    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class StepTile(Checked):
    """A step of decoding: a program has the heads of one group at one query, and of a branch's keys `block_k` at a time. With `split_k` 1 it has all
    branches, in one launch; else up to so many programs share the keys of each, in four. With `block_k` 0, each branch has kernels of its own."""

    block_k: Keys
    split_k: Count
    num_warps: Warps
    num_stages: Count


@dataclasses.dataclass(frozen=True)
class FewTiles:
    """The forward where there are few queries: a step, or two branches as attention over pages."""

    step: StepTile
    compressed: pages.TritonConfig
    sliding: pages.TritonConfig
