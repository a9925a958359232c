"""Conversion between text and tokens: bytes, or the tokenizer of a published model."""

import pathlib
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """The vocabulary of a model."""

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        """The tokens of a text; with `special`, after the one that begins a text, if the model has one."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of the tokens, without an incomplete last character."""
        ...


class Bytes:
    """One token per byte."""

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        return list(text)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


class Published:
    """The `tokenizer.json` of a published model, read with the library `tokenizers`."""

    def __init__(self, path: pathlib.Path):
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{str(path)!r} is not a tokenizer ({error}); download it again.") from error

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        return self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> bytes:
        # A character with missing bytes ends in U+FFFD.
        return self.tokenizer.decode(list(tokens)).rstrip("\ufffd").encode()


def vocabulary_of(folder: pathlib.Path) -> Vocabulary:
    """The vocabulary of a folder with a `tokenizer.json`, otherwise bytes."""
    path = folder / "tokenizer.json"
    return Published(path) if path.is_file() else Bytes()
