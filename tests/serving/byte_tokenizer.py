"""A tokenizer of bytes, in a file as published models have."""

import pathlib

import tokenizers


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
