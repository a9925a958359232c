"""`TextModel`: a published model that takes and returns strings."""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...models import Decoder, from_pretrained, generate, Sampling, stream
from ...models.pretrained import read_config
from .chat import ChatTemplate
from .tokenizer import ByteTokenizer, TextStream, Tokenizer


class TextModel:
    """A model with its tokenizer, and with its chat template if it has one.

    ```python
    model = ejx.serving.text.TextModel.from_folder("Qwen3-0.6B")
    texts = model.generate(["Once upon a time", "def main("], max_new_tokens=50)
    for piece in model.chat([{"role": "user", "content": "Who are you?"}]):
        print(piece, end="", flush=True)
    ```

    **Arguments:**

    - `model`: a [`Decoder`][ejkernel_eqx.models.Decoder].
    - `tokenizer`: the tokenizer of the model.
    - `template`: the chat template of the model. `chat` needs it.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer | ByteTokenizer, template: ChatTemplate | None = None
    ):
        self.model, self.tokenizer, self.template = model, tokenizer, template

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **options: Any) -> "TextModel":
        """Reads a model from a folder with `config.json`, safetensors and `tokenizer.json`. The options are those of
        [`from_pretrained`][ejkernel_eqx.models.from_pretrained]."""
        path = pathlib.Path(folder).expanduser()
        # The small files are read first, so that an error for a missing one comes at once.
        read_config(path / "config.json")
        tokenizer, template = Tokenizer(path / "tokenizer.json"), ChatTemplate.from_folder(path)
        return cls(from_pretrained(path, **options), tokenizer, template)

    def generate(
        self, texts: Sequence[str], *, max_new_tokens: int = 256, sampling: Sampling | None = None
    ) -> list[str]:
        """Continues texts. The options are those of [`generate`][ejkernel_eqx.models.generate].

        **Returns:** the new text of each, without special tokens.

        **Raises:** `ValueError` for a text without tokens, and as [`generate`][ejkernel_eqx.models.generate].
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts: expected a list of strings, received {texts!r}; put it into a list.")
        prompts = [self.tokenizer.encode(text) for text in texts]
        found = generate(self.model, prompts, max_new_tokens=max_new_tokens, sampling=sampling)
        decode = self.tokenizer.decode
        return [decode([*prompt, *new])[len(decode(prompt)) :] for prompt, new in zip(prompts, found.texts())]

    def stream(
        self, text: str, *, max_new_tokens: int = 256, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """Continues a text, and yields the new text piece by piece. No piece ends within a character."""
        return self._pieces(self.tokenizer.encode(text), max_new_tokens, sampling)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 1024,
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Answers messages with `role` and `content`, and yields the answer piece by piece.

        **Raises:** `ValueError` for a model without a chat template; `ChatTemplateError` where the template refuses the messages.
        """
        if self.template is None:
            raise ValueError(
                "template: expected the chat template of the model, received None; this model continues texts: use generate."
            )
        # The template writes the special tokens itself.
        prompt = self.tokenizer.encode(self.template.render(messages), special=False)
        return self._pieces(prompt, max_new_tokens, sampling)

    def _pieces(self, prompt: list[int], max_new_tokens: int, sampling: Sampling | None) -> Iterator[str]:
        steps = stream(self.model, [prompt], max_new_tokens=max_new_tokens, sampling=sampling)
        text: TextStream = self.tokenizer.stream(prompt)
        for tokens in steps:
            if piece := text.push(int(tokens[0])):
                yield piece
        if piece := text.end():
            yield piece
