"""A tokenizer of bytes, in a file as published models have; and the folder of such a model."""

import json
import pathlib

import tokenizers
from safetensors.numpy import save_file

from tests.models.cases import GOLDEN
from tests.models.test_published import weights_of


def byte_tokenizer(path: pathlib.Path) -> pathlib.Path:
    """Writes one whose 256 first tokens are bytes, with the special tokens `<s>` and `</s>` behind them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={x: n for n, x in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))
    return path


def llama_folder(path: pathlib.Path, template: str) -> pathlib.Path:
    """Writes a random Llama with this chat template. Its vocabulary of 61 tokens, which are punctuation, is smaller than that of its tokenizer."""
    config = GOLDEN["llama"]["config"] | {"eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights_of("llama"), path / "model.safetensors")
    byte_tokenizer(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(template)
    return path
