"""A few instructions of PTX, computed by NumPy: what inline assembly makes of its inputs, without a GPU."""

import re
from typing import Any

import ml_dtypes
import numpy as np

_OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


def evaluate(code: str, *inputs: Any) -> list[np.ndarray]:
    """The two outputs of `code`, uint32 as the inputs are, which follow them as `$2` and so on."""
    values = {f"${n}": np.asarray(x, np.uint32) for n, x in enumerate(inputs, 2)}

    def read(operand: str) -> Any:
        return values[operand] if operand in values else np.uint32(int(operand, 0))

    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *operands = _OPERAND.findall(rest)
        if name == "mov.b32" and target.startswith("{"):
            low, high = _OPERAND.findall(target[1:-1])
            values[low], values[high] = read(operands[0]) & 0xFFFF, read(operands[0]) >> 16
        else:
            values[target] = _OPERATIONS[name](*map(read, operands))
    return [np.asarray(values[name], np.uint32) for name in ("$0", "$1")]


def halves_of(x: Any) -> np.ndarray:
    """The low and the high halves of uint32 numbers as float16 `[..., 2]`."""
    return np.ascontiguousarray(np.asarray(x, np.uint32)).view(np.float16).reshape(*np.shape(x), 2)


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    parts = [(x >> (8 * n)) & 0xFF for x in (a, b) for n in range(4)]
    return sum(parts[int(selector) >> (4 * n) & 7] << (8 * n) for n in range(4))


def _logic(a: Any, b: Any, c: Any, table: Any) -> Any:
    assert table == 0x6A, table
    return (a & b) ^ c


def _difference(a: Any, b: Any) -> Any:
    bits = (halves_of(a) - halves_of(b)).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << 16


def _two_floats(x: Any) -> Any:
    parts = [np.asarray((x >> n) & 0xFF, np.uint8).view(ml_dtypes.float8_e4m3fn) for n in (0, 8)]
    low, high = (part.astype(np.float16).view(np.uint16).astype(np.uint32) for part in parts)
    return low | high << 16


_OPERATIONS: dict[str, Any] = {
    "and.b32": lambda a, b: a & b,
    "cvt.rn.f16x2.e4m3x2": _two_floats,
    "lop3.b32": _logic,
    "mov.b32": lambda a: a,
    "prmt.b32": _permuted,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "sub.f16x2": _difference,
    "xor.b32": lambda a, b: a ^ b,
}
