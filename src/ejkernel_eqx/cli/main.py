"""The command line: parses arguments, runs a command and returns an exit code."""

import argparse
import contextlib
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from .. import __version__
from .._errors import EjkernelError
from . import bench, cache, doctor, generate, report, serve, tune
from .output import FAILED, OK, Outcome, USAGE, UsageError, write_json

_DESCRIPTION = """Shows which kernels this machine supports, tunes them, times them, and runs models with them.

examples:
  python -m ejkernel_eqx doctor
  python -m ejkernel_eqx tune flash_attention --shape B=4,T=4096,H=16,D=128 --flag causal
  python -m ejkernel_eqx bench flash_attention --shape B=4,T=4096,H=16,D=128 --flag causal
  python -m ejkernel_eqx cache list
  python -m ejkernel_eqx report tuning.html
  python -m ejkernel_eqx chat path/to/Qwen3-0.6B
  python -m ejkernel_eqx serve path/to/Qwen3-0.6B

exit codes: 0 success, 1 something is wrong or failed, 2 invalid command line
"""

Command = Callable[[argparse.Namespace], Outcome]


class _Parser(argparse.ArgumentParser):
    """Raises errors instead of printing them, so that `--json` can return a document."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}\nsee `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Its result goes to standard output, everything else to standard error."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    # The flag is read before parsing, because errors of the parser are documents too.
    as_json = "--json" in typed
    try:
        options = parser().parse_args(typed)
        options.stdout = sys.stderr if as_json else sys.stdout
        # Imported modules may print; only the result goes to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            _import(options.imports)
            outcome = options.run(options)
            shown = write_json(outcome.document) if as_json else outcome.text()
    except SystemExit as stop:  # `--help`, `--version`
        return OK if stop.code in (None, 0) else USAGE
    except UsageError as error:
        return _fail(error, as_json, USAGE)
    except (EjkernelError, OSError, jax.errors.JaxRuntimeError) as error:
        return _fail(error, as_json, FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", as_json, FAILED)
    print(shown)
    return outcome.code


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"--import: expected a module that can be imported, received {name!r} ({error}); "
                "install it, or run the command from a folder where it can be found."
            ) from error


def _fail(error: Any, as_json: bool, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    if as_json:
        print(write_json({"error": str(error), "exit_code": code}))
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of all commands and their arguments."""
    top = _Parser(
        prog=_program(),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ejkernel-eqx {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    add = _adder(commands)
    doctor.add_arguments(
        add("doctor", doctor.run, "show the platforms that can be used here, and problems", doctor.HELP)
    )
    tune.add_arguments(
        add("tune", tune.run, "find the fastest correct configurations for problems", tune.HELP)
    )
    bench.add_arguments(add("bench", bench.run, "check and time every usable platform", bench.HELP))
    report.add_arguments(add("report", report.run, "write a page about all tuned problems", report.HELP))
    generate.add_arguments(
        add("generate", generate.run, "continue texts with a published model", generate.HELP)
    )
    generate.add_chat_arguments(
        add("chat", generate.run_chat, "talk with a published model", generate.CHAT_HELP)
    )
    serve.add_arguments(add("serve", serve.run, "serve a published model over HTTP", serve.HELP))
    kept = commands.add_parser("cache", help="manage tuned configurations: list, show, export, import, clear")
    cache.add_commands(_adder(kept.add_subparsers(metavar="COMMAND", required=True)))
    return top


def _program() -> str:
    """The command as it was started: by its own name, or as a Python module."""
    started = pathlib.Path(sys.argv[0]).stem
    return started if started == "ejkernel-eqx" else "python -m ejkernel_eqx"


def _adder(commands: Any) -> Callable[[str, Command, str, str], argparse.ArgumentParser]:
    def add(name: str, run: Command, summary: str, description: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument("--json", action="store_true", help="print one JSON document on standard output")
        made.add_argument(
            "--import",
            action="append",
            default=[],
            dest="imports",
            metavar="MODULE",
            help="import a module that registers kernels, such as my_package.kernels; may be repeated",
        )
        made.set_defaults(run=run)
        return made

    return add
