"""The problems that are measured and tuned, as `problems.toml` lists them: those of benchmarks, and those of operations for the tuner."""

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax

import ejkernel_eqx as ejx
from benchmarks import report
from benchmarks.prepare import DIRECTIONS
from ejkernel_eqx._kernel import selections_of
from ejkernel_eqx.cli.problems import DTYPES
from ejkernel_eqx.dispatch import Implementation
from ejkernel_eqx.dispatch import Problem as OperationProblem
from ejkernel_eqx.tuning.explain import example_problem_of

P = TypeVar("P", bound="Problem")
_SIZE = re.compile(r"([A-Za-z]+)(\d+)")
_BRACES = re.compile(r"\{(.*?)\}")
DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of a benchmark, named by the `words` of its sizes and options. A first field that is a text is its title."""

    dtype: str = DTYPE
    directions: ClassVar[Any] = DIRECTIONS

    def words(self) -> Iterable[str]:
        """The parts of the name; empty ones are left out."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return " ".join([*filter(None, self.words()), *([] if self.dtype == DTYPE else [self.dtype])])


# The notation


class Line(NamedTuple):
    """The parts of a line, of which a title and options may be missing."""

    title: str
    sizes: dict[str, int]
    dtype: str
    options: dict[str, Any]


def read(line: str) -> Line:
    """Reads a line such as `"prefix, as a function B2 S8192 float32 share=0.1"`."""
    words = line.split()
    first = next(n for n, word in enumerate(words) if _SIZE.fullmatch(word))
    sizes = {}
    for word in words[first:]:
        if word in DTYPES or (match := _SIZE.fullmatch(word)) is None:
            break
        sizes[match[1]] = int(match[2])
    dtype, *options = words[first + len(sizes) :] or [DTYPE]
    if dtype not in DTYPES:
        dtype, options = DTYPE, [dtype, *options]
    pairs = (option.partition("=") for option in options)
    return Line(" ".join(words[:first]), sizes, dtype, {name: _value(text) for name, _, text in pairs})


def _value(text: str) -> Any:
    """A number, a truth value or a text; `True` for an option without a value."""
    try:
        return ast.literal_eval(text or "True")
    except (ValueError, SyntaxError):
        return text


def expanded(line: str) -> list[str]:
    """The lines that one with braces stands for."""
    if (match := _BRACES.search(line)) is None:
        return [line]
    before, after = line[: match.start()], line[match.end() :]
    return [each for word in match[1].split("|") for each in expanded(f"{before}{word}{after}")]


def _tables() -> dict[str, dict[str, Any]]:
    return report.data("problems")


def lines(table: str, name: str) -> list[str]:
    """The lines of a list of problems; none if there is no such list."""
    text = _tables()[table].get(name, "")
    return [each for line in text.splitlines() for each in expanded(line)]


def load(family: str, kind: type[P]) -> dict[str, tuple[P, ...]]:
    """The lists of a benchmark's problems by name."""
    return {name: tuple(_make(kind, line) for line in lines(family, name)) for name in _tables()[family]}


def model_config(name: str) -> dict[str, Any]:
    return dict(_tables()["models"][name])


def _make(kind: type[P], line: str) -> P:
    title, sizes, dtype, options = read(line)
    named = {dataclasses.fields(kind)[1].name: title} if title else {}
    return kind(**named, **sizes, dtype=dtype, **options)


# What is tuned


class TuneProblem(NamedTuple):
    """A named problem; `make` returns the problem that its operation passes to an implementation."""

    name: str
    operation: str
    make: Callable[[Implementation], OperationProblem]


class Family(NamedTuple):
    """The problems of one family of operations.

    `also(operation, problem)`: whether another operation of the same kernels may have this problem too.
    """

    name: str
    also: Callable[[str, OperationProblem], bool] = lambda operation, problem: False

    def problems(self) -> list[TuneProblem]:
        every = ("anchors", "features", "grid", "models", "held_out")
        return self._of_attention(*every) + [*map(_named, lines("tuned", self.name))]

    def tiny(self) -> list[TuneProblem]:
        return self._of_attention("tiny") + [*map(_named, lines("tiny", self.name))]

    def _of_attention(self, *lists: str) -> list[TuneProblem]:
        if self.name != "attention":
            return []
        from benchmarks.attention import PROBLEMS

        return [
            TuneProblem(p.name, "flash_attention", functools.partial(attention_problem, p))
            for name in lists
            for p in PROBLEMS[name]
        ]


def attention_problem(problem: Any, implementation: Implementation) -> OperationProblem:
    from benchmarks import attention

    inputs = jax.eval_shape(lambda: attention.make_inputs(problem))
    operation = attention.build(problem, implementation.platform.value)
    return selections_of(operation, ejx.inputs(**inputs.learned, **inputs.constants))[0].problem


def _named(line: str) -> TuneProblem:
    """A problem from sizes and flags."""
    operation, sizes, dtype, flags = read(line)
    words = [operation, *(f"{name}{size}" for name, size in sizes.items()), dtype]
    words += [name if value is True else f"{name}={value}" for name, value in flags.items()]

    def make(implementation: Implementation) -> OperationProblem:
        return example_problem_of(operation)(operation, dict(sizes), dtype, flags)

    return TuneProblem(" ".join(words), operation, make)


def _is_plain_linear(operation: str, problem: OperationProblem) -> bool:
    extra = any(problem.flag(name) for name in ("delta", "beta", "skip"))
    return operation == "linear_attention" and not extra


def _asks_for(operation: str, problem: OperationProblem) -> bool:
    """Tells whether an operation of attention over pages may have a problem of another one."""
    if (operation == "ragged_decode_attention") != bool(problem.flag("ranged")):
        return False
    if operation == "absorbed_latent_attention" and not problem.flag("latent"):
        return False
    if problem.flag("alibi_slopes") or problem.flag("qq_bias"):
        return operation == "unified_attention"
    decodes = problem.dim("Q") == 1 and problem.dim("T") == problem.dim("N")
    return decodes or operation not in ("paged_attention", "ragged_decode_attention")


_ALSO = {"attention": lambda *_: True, "recurrence": _is_plain_linear, "paged": _asks_for}
FAMILIES = {name: Family(name, *([_ALSO[name]] if name in _ALSO else [])) for name in _tables()["tuned"]}
