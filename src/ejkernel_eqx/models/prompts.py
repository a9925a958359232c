"""Reads and checks the prompts of a call and its stop tokens."""

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Sharding

from .._shapes import is_symbolic
from ..dispatch import Backend
from ..nn.arguments import check_tokens, is_known, read_array

# Prompts and lists of stop tokens are padded to a multiple of these, so that few shapes are compiled.
_ROUNDING, _STOPS = 64, 8


def rounded(count: int) -> int:
    return -(-count // _ROUNDING) * _ROUNDING


def in_few_sizes(count: int, least: int, most: int | None = None) -> int:
    """A count, rounded up to one of few sizes. There are two sizes for each doubling. Small counts become multiples of `least`, large ones of
    `most`."""
    step = max(least, (1 << (count - 1).bit_length()) // 4)
    step = step if most is None else min(step, most)
    return -(-count // step) * step


def capacity_of(count: int, backend: Backend) -> int:
    """The capacity of a cache for `count` tokens.

    Each capacity needs a program of its own, so there are few: two for each doubling from 256 on, and multiples of 4,096 for long texts. A cache may
    therefore be up to half as large again as needed. On a CPU a step reads the whole capacity, so there it is a multiple of 64.
    """
    if backend is Backend.CPU:
        return rounded(count)
    return in_few_sizes(count, 256, 4096)


def widened(*rows: Any) -> tuple[Any, ...]:
    """Tokens `[N, T]` and their mask, padded on the left to a power of two or a multiple of 64, if the host has them."""
    if not all(isinstance(x, np.ndarray) for x in rows):
        return rows
    length = rows[0].shape[1]
    before = min(1 << (length - 1).bit_length(), rounded(length)) - length
    return tuple(np.pad(x, ((0, 0), (before, 0))) for x in rows)


def is_on_one_device(x: Any) -> bool:
    """Returns whether the host can read an array of JAX from one device."""
    return isinstance(x, Array) and is_known(x) and len(x.sharding.device_set) == 1


def device_of(prompts: Any) -> Sharding | None:
    """Where the caller has put an array of prompts, if on one device. Other prompts go to the devices of the model."""
    return prompts.sharding if is_on_one_device(prompts) and prompts.committed else None


def _on_host(x: Array) -> Any:
    """The array in NumPy, if one device has it: each operation on it there would be a launch."""
    return np.asarray(x) if is_on_one_device(x) else x


def read_stop(stop: Any, vocabulary: int) -> np.ndarray:
    """The stop tokens, int32 `[...]`, padded with -1, which is no token."""
    if not isinstance(stop, Sequence | np.ndarray | Array):
        raise ValueError(
            f"stop_tokens: expected a sequence of tokens, received {stop!r}; (2,) is one, and () stops at none."
        )
    stop = tuple(stop if isinstance(stop, Sequence) else np.asarray(stop).reshape(-1))
    for token in stop:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise ValueError(
                f"stop_tokens: expected tokens from 0 to {vocabulary - 1}, received {token!r}; () stops at none."
            )
    # -1 is no token, so it ends no row.
    padding = -len(stop) % _STOPS if stop else _STOPS
    return np.asarray([*stop, *[-1] * padding], np.int32)


def read_prompts(prompts: Any, padding_mask: Any, vocabulary: int) -> tuple[Any, Any]:
    """The tokens of all prompts and their mask, `[..., T]`; in NumPy, unless they are traced or on several devices."""
    if isinstance(prompts, Array | np.ndarray):
        is_read = isinstance(prompts, np.ndarray) and np.issubdtype(prompts.dtype, np.integer)
        tokens = prompts if is_read else _on_host(read_array("prompts", prompts, "integers", "[..., T]"))
        if tokens.ndim < 1 or tokens.shape[-1] == 0:
            raise ValueError(
                f"prompts: expected at least one token [..., T], received shape {tokens.shape}; give it some text."
            )
        if any(map(is_symbolic, tokens.shape)):
            raise ValueError(
                f"prompts: expected sizes that are known, received shape {tokens.shape}; export it for each shape, or a step of model.features with "
                "a cache, whose rows may be symbolic."
            )
        check_tokens("padding_mask", padding_mask, "booleans", "prompts", tokens[..., None])
        mask = np.ones(tokens.shape, bool) if padding_mask is None else _on_host(padding_mask)
    else:
        if padding_mask is not None:
            raise ValueError(
                "padding_mask: expected None with lists of tokens, received one; their lengths say it."
            )
        tokens, mask = _padded(prompts)
    if is_known(tokens) and is_known(mask):
        _check_values(np.asarray(tokens), np.asarray(mask), vocabulary)
    return tokens.astype(np.int32), mask


def check_positions(room: int | None, mask: Any, new: int) -> None:
    """Raises if it is known that a prompt and so many new tokens do not fit in the positions of a model that learned them."""
    if room is None or not is_known(mask):
        return
    longest = int(np.max(np.sum(np.asarray(mask), axis=-1), initial=0))
    if longest + new - 1 > room:  # the last new token is not read
        raise ValueError(
            f"max_new_tokens: expected a prompt and new tokens in {room} positions, as many as the model has, received {longest} + {new}; "
            "request fewer, or shorten the prompt."
        )


def _padded(prompts: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = rows_of(prompts)
    width = rounded(max(map(len, rows))) or 1
    tokens = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return tokens, mask


def rows_of(prompts: Any, name: str = "prompts") -> list[list[int]]:
    """The tokens of each prompt, from a list of lists or arrays."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    if is_list and any(isinstance(row, int | np.integer) for row in prompts):
        raise ValueError(
            f"{name}: expected a list of tokens for each text, received one list of integers; put it into a list, [[1, 2, 3]]."
        )
    if not is_list or not prompts:
        raise _not_tokens(name, prompts, "")
    rows: list[Any] = [
        row.tolist() if isinstance(row, Array | np.ndarray) and row.ndim else row for row in prompts
    ]
    for i, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise _not_tokens(name, row, f" as {name}[{i}]")
        for token in row:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise _not_tokens(name, token, f" in {name}[{i}]")
    return [list(row) for row in rows]


def _not_tokens(name: str, value: Any, where: str) -> ValueError:
    is_text = isinstance(value, str | bytes)
    remedy = (
        "ejx.serving.text.TextModel takes texts" if is_text else "tokens are integers, such as [[1, 2, 3]]"
    )
    return ValueError(
        f"{name}: expected integers [..., T] or lists of tokens, received {type(value).__name__} {reprlib.repr(value)}{where}; {remedy}."
    )


def _check_values(tokens: np.ndarray, mask: np.ndarray, vocabulary: int) -> None:
    if not np.all(mask.any(axis=-1)):
        raise ValueError(
            "prompts: expected at least one token in each, received an empty one; give it some text, or the model's first token."
        )
    begins = np.diff(mask.astype(np.int8), axis=-1, prepend=0) > 0
    if np.any(begins.sum(axis=-1) > 1):
        raise ValueError(
            "padding_mask: expected the real tokens of each row side by side, received padding between them; take it out of the row."
        )
    wrong = tokens[mask & ((tokens < 0) | (tokens >= vocabulary))]
    if wrong.size:
        raise ValueError(
            f"prompts: expected tokens from 0 to {vocabulary - 1}, received {int(wrong[0])}; use the tokenizer of this model."
        )
