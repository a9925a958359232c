"""`report FILE`: writes a page about all problems in the user's cache for this device."""

import argparse

from .._errors import EjkernelError
from ..tuning.report.document import cached_records, tuning_report
from .output import count, Outcome, user_input

HELP = """The page shows the time of every candidate, the winners, rejected candidates with reasons, and the roofline. It requires matplotlib:
pip install 'ejkernel-eqx[report]'

example:
  python -m ejkernel_eqx report tuning.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="the page to write: .html, or .png for the pictures only"
    )
    parser.add_argument("--operation", metavar="OP", help="only this operation")


def run(options: argparse.Namespace) -> Outcome:
    records = [r for r in cached_records() if r.operation == (options.operation or r.operation)]
    try:
        with user_input("FILE"):
            path = tuning_report(options.file, records)
    except ImportError as error:
        raise EjkernelError(str(error)) from error
    return Outcome(
        {"file": str(path), "problems": len(records)},
        lambda: f"{count(len(records), 'problem')} written to {path}",
    )
