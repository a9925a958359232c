"""Chat templates of published models. They are not trusted, so they are rendered in a sandbox, with limits on work and output."""

import datetime
import json
import os
import pathlib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..._errors import require

_WHO = "ejkernel_eqx.serving.text"
jinja2 = require("jinja2", _WHO, "text")
nodes, sandbox, ext, visitor = (
    require(f"jinja2.{name}", _WHO, "text") for name in ("nodes", "sandbox", "ext", "visitor")
)

_MOST_SOURCE, _MOST_OUTPUT, _MOST_FILE = 2**18, 2**22, 2**26
_MOST_WORK = 2**20
"""The most loop iterations, calls and pieces of 64 characters that a template may process."""
_FILTERS = """abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject rejectattr
reverse safe select selectattr sort string sum title trim unique upper""".split()
_METHODS = """capitalize count endswith find index isalnum isalpha isdigit isspace lower lstrip partition removeprefix removesuffix replace rfind
rpartition rsplit rstrip split splitlines startswith strip title upper""".split()

_CHEAP = """boolean count d default defined false first float integer iterable last length mapping none number sequence string true
undefined""".split()

_FIELDS = {"Filter": "node", "Test": "node", "Compare": "expr", "Operand": "expr"}
_FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FAILURES += (RecursionError, MemoryError, SyntaxError)


class ChatTemplateError(ValueError):
    """A chat template cannot be read, or it refuses these messages."""


class _Generation(ext.Extension):
    """The tag `{% generation %}`, which marks text of the model. It changes nothing here."""

    tags = frozenset(["generation"])

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class _Counting(visitor.NodeTransformer):
    """Compiles templates such that `_Sandbox` counts everything that is iterated, compared, filtered or built."""

    def visit(self, node: Any) -> Any:
        call = lambda name, *values: nodes.Call(nodes.EnvironmentAttribute(name), [*values], [], None, None)
        kind, field = type(node), _FIELDS.get(type(node).__name__)
        if kind is nodes.For:
            if node.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.iter = call("counted", node.iter, nodes.Const(1 + text // 64))
        self.generic_visit(node)
        if kind is nodes.Concat:
            return call("joined", nodes.List(node.nodes))
        if kind in (nodes.List, nodes.Tuple, nodes.Dict):
            return node if getattr(node, "ctx", "load") == "store" else call("sized", node)
        if kind is nodes.Getitem and isinstance(node.arg, nodes.Slice):
            field = "node"
        if field and getattr(node, field) is not None and getattr(node, "name", None) not in _CHEAP:
            setattr(node, field, call("sized", getattr(node, field)))
        return node


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self):
        finalize = jinja2.pass_context(lambda context, value: self.sized(value))
        options = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False, "finalize": finalize}
        super().__init__(**options, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.left = _MOST_WORK
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {"tojson": _json, "join": self._join, "replace": self._replace}
        self.filters["indent"] = self._indent
        self.globals = {
            name: self.globals[name] for name in ("range", "namespace")
        }  # at most 100,000 numbers
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise ChatTemplateError("chat_template: it does too much work; check its loops.")

    def sized(self, value: Any) -> Any:
        """Counts the size of a value, and returns the value."""
        self.spend(1 + (len(value) // 64 if isinstance(value, str) else 0))
        if isinstance(value, Collection) and not isinstance(value, str):
            for part in value.items() if isinstance(value, Mapping) else value:
                self.sized(part)
        return value

    def counted(self, values: Any, work: int) -> Any:
        for value in values:
            self.spend(work)
            yield value

    def joined(self, parts: Sequence[Any], between: str = "") -> str:
        self.spend(len(parts) * (1 + len(between) // 64))
        return between.join(str(self.sized(part)) for part in parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        known = attr in _METHODS if isinstance(obj, str) else True
        return known and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            self.sized(text)
            if obj.__name__ == "replace":
                return self._replace(text, *args)
        if obj not in (self.counted, self.sized, self.joined):
            self.sized((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(value, int | float) for value in (left, right))
        if numbers and operator in "**":
            bits = (abs(int(left)).bit_length(), abs(int(right)).bit_length())
            self.spend(1 + (sum(bits) if operator == "*" else bits[0] * min(abs(int(right)), 2**30)))
        elif operator == "+" or numbers:
            self.sized((left, right))
        elif operator == "*":
            times, _ = (left, self.sized(right)) if isinstance(left, int) else (right, self.sized(left))
            size = len(right if isinstance(left, int) else left)
            self.spend(1 + max(0, times) * (1 + size) // 64)
        else:
            raise ChatTemplateError(f"chat_template: expected numbers for {operator}, received others.")
        return super().call_binop(context, operator, left, right)

    def _join(self, values: Any, between: str = "", attribute: str | None = None) -> str:
        values = values if attribute is None else [self.getitem(value, attribute) for value in values]
        return self.joined(list(values), str(between))

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        text = str(text)
        self.spend(1 + (len(text) + 1) * (1 + len(new)) // 64)
        return text.replace(old, new, count)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        indent = width if isinstance(width, str) else " " * min(width, 64)
        lines = str(text).split("\n")
        some = [line if not (line or blank) else indent + line for line in lines]
        return self.joined([lines[0] if not first else some[0], *some[1:]], "\n")


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as published templates expect it, without escapes for HTML."""
    options = {name: options.get(name) for name in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent and min(indent, 16), **options)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"messages: the model's chat template refuses them: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form[:64])


class ChatTemplate:
    """Renders messages as the prompt of a chat model, by its published template.

    The template is a Jinja program, written by whoever published the model. It runs in an immutable sandbox without a loader. There are limits on the
    length of its source, on its work and on its output.

    **Arguments:**

    - `source`: the text of the template.
    - `variables`: further variables that the template reads, such as `bos_token`.

    **Raises:** `ChatTemplateError` for a template that is too long or has a mistake.
    """

    def __init__(self, source: str, **variables: Any):
        if not isinstance(source, str) or len(source) > _MOST_SOURCE:
            raise ChatTemplateError(
                f"chat_template: expected a text of at most {_MOST_SOURCE:,} characters; this is none, or a longer one."
            )
        self._environment, self._variables, self._lock = _Sandbox(), variables, threading.Lock()
        environment = self._environment
        try:
            program = environment.compile(_Counting().visit(environment.parse(source)))
            self._template = jinja2.Template.from_code(environment, program, environment.make_globals(None))
        except _FAILURES as error:
            raise ChatTemplateError(f"chat_template: it cannot be read ({error}).") from error

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "ChatTemplate | None":
        """Reads the template of a published model from `chat_template.jinja`, or from `tokenizer_config.json`. `None` if there is none."""
        names = ("tokenizer_config.json", "chat_template.jinja")
        path, alone = (pathlib.Path(folder) / name for name in names)
        try:
            config = json.loads(_read(path)) if path.is_file() else {}
            source = _read(alone) if alone.is_file() else config.get("chat_template")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ChatTemplateError(f"folder: {str(folder)!r} has no readable template ({error}).") from error
        if isinstance(source, list):  # several with names
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        text = lambda token: token.get("content") if isinstance(token, dict) else token
        tokens = {name: text(value) for name, value in config.items() if name.endswith("_token")}
        tokens = {name: value for name, value in tokens.items() if isinstance(value, str)}
        return None if source is None else cls(source, **tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders the prompt for messages.

        **Arguments:**

        - `messages`: dictionaries with `role` and `content`.
        - `variables`: further variables that the template reads, such as `tools`.

        **Returns:** the text of the prompt.

        **Raises:** `ChatTemplateError` if the template refuses the messages or exceeds its limits.
        """
        variables = self._variables | variables
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        pieces: list[str] = []
        with self._lock:
            self._environment.left, size = _MOST_WORK, 0
            try:
                for piece in self._template.generate(variables):
                    size += len(piece)
                    if size > _MOST_OUTPUT:
                        raise ChatTemplateError("chat_template: its output is too long; check its loops.")
                    pieces.append(piece)
            except ChatTemplateError:
                raise
            except _FAILURES as error:
                raise ChatTemplateError(
                    f"messages: the chat template cannot render them ({error})."
                ) from error
        return "".join(pieces)


def _read(path: pathlib.Path) -> str:
    if path.stat().st_size > _MOST_FILE:
        raise ValueError(f"{path.name} has more than {_MOST_FILE:,} bytes")
    return path.read_text(encoding="utf-8")
