"""An extension of Python-Markdown: formulas as MathML, and titles of the reference that break after a dot.

A page then needs no script and no network to show formulas.
"""

import html
import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL
)  # as `pymdownx.arithmatex` leaves them
_NAME = re.compile(
    r'(?<=doc-object-name )(doc-[a-z]+-name">)([\w.]+)(?=</span>)'
)  # as mkdocstrings leaves it


def _mathml(found: re.Match) -> str:
    tag, bracket, formula = found.groups()
    mathml = convert(html.unescape(formula).strip(), display="block" if bracket == "[" else "inline")
    return f'<{tag} class="math">{mathml}</{tag}>'


def _breakable(found: re.Match) -> str:
    return found[1] + found[2].replace(".", ".<wbr>")


class _Page(Postprocessor):
    def run(self, text: str) -> str:
        text = _NAME.sub(_breakable, _FORMULA.sub(_mathml, text))
        if 'class="arithmatex"' in text:
            raise ValueError("a formula on this page is not of the form that `pymdownx.arithmatex` writes")
        return text


class _Extension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_Page(md), "page", -10)  # after all others


def makeExtension(**options) -> Extension:
    return _Extension(**options)
