"""Parses arguments (`--shape B=4,T=4096 --flag causal`) into problems, and finds their implementations."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import jax

from .._errors import EjkernelError
from ..dispatch import (
    device_facts,
    DeviceFacts,
    Implementation,
    kernel_registry,
    of_device,
    Problem,
    select,
    take_snapshot,
)
from ..tuning.explain import example_problem_of
from .output import UsageError, user_input

DTYPES = ("bfloat16", "float16", "float32", "float64")
_WORDS = {"true": True, "false": False, "none": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that specify a problem."""
    add = parser.add_argument
    add("operation", metavar="OP", help="an operation, such as flash_attention (see doctor)")
    sizes = "sizes by letter, such as B=4,T=4096,H=16,D=128; may be repeated"
    add("--shape", action="append", required=True, metavar="SIZES", help=sizes)
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    flags = "an option of the operation, such as causal or window=1023,0; may be repeated"
    add("--flag", action="append", default=[], metavar="NAME[=VALUE]", help=flags)


def positive(kind: Any) -> Any:
    """An argument type for positive numbers."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a positive number, received {text!r}")
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse includes the name in its message
    return parse


def parse_shape(text: str) -> dict[str, int]:
    """`"B=4,T=4096"` -> `{"B": 4, "T": 4096}`."""
    sizes: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = item.partition("=")
        if not (equals and name.isidentifier() and size.isdecimal() and int(size) > 0):
            raise UsageError(
                f"--shape: expected sizes such as B=4,T=4096 (positive integers), received {item!r}."
            )
        if name in sizes:
            raise UsageError(f"--shape: expected each letter once, received {name} twice in {text!r}.")
        sizes[name] = int(size)
    if not sizes:
        raise UsageError(f"--shape: expected sizes such as B=4,T=4096, received {text!r}.")
    return sizes


def parse_flags(texts: Sequence[str]) -> dict[str, Any]:
    """`["soft_cap", "window=1023,0", "causal=false"]` -> names to values; a bare name is `True`."""
    flags: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier():
            raise UsageError(f"--flag: expected NAME or NAME=VALUE, received {text!r}.")
        if name in flags:
            raise UsageError(f"--flag: expected each name once, received {name} twice.")
        flags[name] = _value(value) if equals else True
    return flags


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # Int goes first, because float would read whole numbers too.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def this_device() -> DeviceFacts:
    """JAX's default device; `EjkernelError` if there is none, for instance with a wrong JAX_PLATFORMS or a failing driver."""
    try:
        return device_facts()
    # An internal assertion of JAX fails if JAX_PLATFORMS names an unknown platform.
    except (RuntimeError, AssertionError) as error:
        why = (str(error).splitlines() or ["no platform could be started"])[0]
        asked = os.environ.get("JAX_PLATFORMS")
        raise EjkernelError(f"JAX has no device: {why} (JAX_PLATFORMS is {asked!r})") from error


def make_problems(options: argparse.Namespace) -> list[Problem]:
    """The distinct problems on the command line, in order."""
    this_device()
    if options.dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise UsageError(
            "--dtype: float64 needs JAX's 64-bit mode; set the environment variable JAX_ENABLE_X64=1."
        )
    flags = parse_flags(options.flag)
    shapes = [parse_shape(text) for text in options.shape]
    with user_input():
        make = example_problem_of(options.operation)
    problems = []
    for text, dims in zip(options.shape, shapes):
        with user_input(f"--shape {text}"):
            problems.append(make(options.operation, dims, options.dtype, flags))
    return list(dict.fromkeys(problems))


def chosen_implementation(problem: Problem, platform: str | None) -> Implementation:
    """The implementation that the library chooses here; `UnsupportedError` with all reasons if there is none."""
    with user_input():
        snapshot = take_snapshot(problem.operation, platform=platform)
    return select(snapshot, problem).implementation


def implementations(operation: str, platforms: Sequence[str]) -> list[Implementation]:
    """The implementations of the named platforms; by default, all that the library chooses from."""
    with user_input():
        if platforms:
            return [kernel_registry.get(operation, platform) for platform in dict.fromkeys(platforms)]
        # Platforms of negative priority are used only by name.
        known = tuple(i for i in kernel_registry.ordered(operation) if i.priority >= 0)
        return list(of_device(known, device_facts()))
