"""`Tokenizer`, `ByteTokenizer` and `TextStream`: convert between text and tokens."""

import os
from collections.abc import Callable, Sequence

from ..._errors import require

tokenizers = require("tokenizers", "ejkernel_eqx.serving.text", "text")

_CONTEXT = 8
"""The number of tokens of a prompt that are decoded with the first generated ones, which may depend on them."""
_MOST_PENDING = 16
"""The number of tokens after which bytes that are no character are shown as U+FFFD."""


class Tokenizer:
    """The tokenizer of a published model.

    **Arguments:**

    - `path`: the path of its `tokenizer.json`.

    **Raises:** `ValueError` if the file cannot be read or is no tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.path.isfile(path):
            raise ValueError(
                f"path: expected a tokenizer.json, but {os.fspath(path)!r} is not there; copy that of the model into the folder."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(
                f"path: expected a tokenizer.json, but {os.fspath(path)!r} is none ({error}); download it again."
            ) from error

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text. With `special`, the tokenizer adds its special tokens before and after them, if it has any. Halves of surrogate
        pairs, which JSON may hold alone, are no characters and become question marks."""
        text = text.encode(errors="replace").decode()
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens. Bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(tokens))

    def stream(self, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> "TextStream":
        """A `TextStream` for tokens that are generated after a prompt, up to the first stop string."""
        return TextStream(self.decode, prompt, stop)


class ByteTokenizer:
    """A tokenizer for models of bytes, with the methods of [`Tokenizer`][ejkernel_eqx.serving.text.Tokenizer]. The tokens of a text are the bytes of
    its UTF-8 encoding, 0 to 255. Tokens from 256 on are special: they have no text."""

    vocab_size: int = 256

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The bytes of a text. There are no special tokens to add."""
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. Bytes that are no character become U+FFFD."""
        return bytes([token for token in tokens if token < 256]).decode(errors="replace")

    def stream(self, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> "TextStream":
        """A `TextStream` for tokens that are generated after a prompt, up to the first stop string."""
        return TextStream(self.decode, prompt, stop)


class TextStream:
    """Converts tokens to text while they are generated. No piece ends within a character, or within the beginning of a stop string.

    The text ends before the stop string that is complete first. The whole text does not depend on how it is divided into tokens.

    **Arguments:**

    - `decode`: a function from tokens to text, with U+FFFD for incomplete characters.
    - `prompt`: the tokens before the text.
    - `stop`: the stop strings; none of them is empty.
    """

    stopped: bool
    """Whether a stop string has been generated."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(
                f"stop: expected texts that are not empty, received {stop!r}; pass a list of them."
            )
        self.stopped, self._decode, self._stop, self._held = False, decode, tuple(stop), ""
        self._tokens = list(prompt[-_CONTEXT:])
        self._context, self._shown = len(self._tokens), len(decode(self._tokens).rstrip("\ufffd"))

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is certain now, which may be empty."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # An incomplete character ends in U+FFFD.
        certain = text.rstrip("\ufffd") if len(self._tokens) <= self._context + _MOST_PENDING else text
        piece, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if certain == text:
            # The text of all tokens was returned. The next tokens are decoded after the last of these.
            del self._tokens[: self._context]
            self._context, self._shown = len(self._tokens), len(self._decode(self._tokens))
        return self._before_stop(piece)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        text = self._before_stop(self._decode(self._tokens)[self._shown :])
        rest, self._held, self.stopped = self._held, "", True
        return text + rest

    def _before_stop(self, piece: str) -> str:
        text = self._held + piece
        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if complete:
            self.stopped, self._held = True, ""
            return text[: min(complete)[1]]
        begun = [n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]
