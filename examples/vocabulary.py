"""Text and tokens: bytes, or the tokenizer of a published model; what to train on, and what is held out."""

import pathlib
import shutil
import sysconfig
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from console import UsageError


class Vocabulary(Protocol):
    """The vocabulary of a model."""

    unit: str
    """What its tokens are called."""

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        """The tokens of a text; with `special`, after the one that begins a text, if the model has one."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of the tokens, without an incomplete last character."""
        ...


class Bytes:
    """One token per byte."""

    unit = "bytes"

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        return list(text)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


class Published:
    """The `tokenizer.json` of a published model, read with the library `tokenizers`."""

    unit = "tokens"

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


def find_texts(path: pathlib.Path | None) -> list[pathlib.Path]:
    """The training files, in an order that is the same on every machine."""
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        foreign = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = [f for f in root.rglob("*.py") if not foreign & set(f.relative_to(root).parts)]
    elif path.is_dir():
        root = path
        files = [f for f in path.rglob("*") if f.is_file()]
    elif path.is_file():
        root, files = path.parent, [path]
    else:
        raise UsageError(
            f"--data: expected a file or a folder, but {str(path)!r} does not exist; check the path."
        )
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def load_data(
    path: pathlib.Path | None, seq_len: int, vocabulary: Vocabulary | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens for training and tokens for validation: every 20th file, or the last 5% if there are fewer files. By default, a token is a
    byte."""
    texts = [f.read_bytes() for f in find_texts(path)]
    if len(texts) >= 20:
        held_out = texts[10::20]
        del texts[10::20]
    else:
        everything = b"\n".join(texts)
        cut = len(everything) - len(everything) // 20
        texts, held_out = [everything[:cut]], [everything[cut:]]
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in (texts, held_out))
    vocabulary = vocabulary or Bytes()
    if not isinstance(vocabulary, Bytes):
        parts = (vocabulary.encode(part.tobytes()) for part in (train, validation))
        train, validation = (np.array(part, np.int32) for part in parts)
    if min(len(train), len(validation)) < seq_len + 1:
        raise UsageError(
            f"--data: expected more than {20 * (seq_len + 1)} {vocabulary.unit} for sequences of {seq_len}, found "
            f"{len(train) + len(validation)} in {str(path or 'the standard library')!r}; pass more text or a smaller "
            "--seq-len."
        )
    return train, validation


def keep_vocabulary(model: pathlib.Path | None, out_dir: pathlib.Path) -> Vocabulary:
    """The tokenizer of the published model, copied beside the checkpoint; without a model, bytes."""
    kept = out_dir / "tokenizer.json"
    if (out_dir / "config.json").exists():
        raise UsageError(
            f"--out-dir: expected a folder for what is written, received {str(out_dir)!r}, which holds a published model; give another."
        )
    if model is None:
        kept.unlink(missing_ok=True)
        return Bytes()
    if not (model / "tokenizer.json").is_file():
        raise UsageError(f"--model: {str(model)!r} has no tokenizer.json; download all files of the model.")
    shutil.copyfile(model / "tokenizer.json", kept)
    return vocabulary_of(out_dir)
