"""The text that `train_lm.py` trains on, as tokens: of bytes, or of the tokenizer of a published model."""

import pathlib
import shutil
import sysconfig

import numpy as np
from console import UsageError

from ejkernel_eqx.serving.text import ByteTokenizer, Tokenizer


def tokenizer_of(folder: pathlib.Path) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a folder with a `tokenizer.json`, otherwise bytes."""
    path = folder / "tokenizer.json"
    return Tokenizer(path) if path.is_file() else ByteTokenizer()


def keep_tokenizer(model: pathlib.Path | None, out_dir: pathlib.Path) -> Tokenizer | ByteTokenizer:
    """The tokenizer of the published model, copied beside the checkpoint. Without a model, bytes."""
    tuned = model is not None and model.resolve() == (out_dir / "tuned").resolve()  # would be written over
    if tuned or (out_dir / "config.json").exists():
        raise UsageError(
            f"--out-dir: expected a folder for what is written, received {str(out_dir)!r}, which holds a published model; give another."
        )
    kept = out_dir / "tokenizer.json"
    if model is None:
        kept.unlink(missing_ok=True)
    elif (model / "tokenizer.json").is_file():
        shutil.copyfile(model / "tokenizer.json", kept)
    else:
        raise UsageError(f"{str(model)!r} has no tokenizer.json; download all files of the model.")
    return tokenizer_of(out_dir)


def find_texts(path: pathlib.Path | None) -> list[pathlib.Path]:
    """The training files, in an order that is the same on every machine."""
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        foreign = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = [f for f in root.rglob("*.py") if not foreign & set(f.relative_to(root).parts)]
    elif path.is_file():
        root, files = path.parent, [path]
    elif path.is_dir():
        root, files = path, [f for f in path.rglob("*") if f.is_file()]
    else:
        raise UsageError(
            f"--data: expected a file or a folder, but {str(path)!r} does not exist; check the path."
        )
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def load_data(
    path: pathlib.Path | None, seq_len: int, tokenizer: Tokenizer | ByteTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens for training and tokens for validation: every 20th file, or the last 5% if there are fewer files. Of a folder,
    files with zero bytes are left out."""
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in find_texts(path)]
    if path is not None and path.is_dir():  # pictures and archives, which stand in many folders
        texts = [text for text in texts if "\0" not in text]
    if len(texts) >= 20:
        held_out = texts[10::20]
        del texts[10::20]
    else:
        everything = "\n".join(texts)
        cut = len(everything) - len(everything) // 20
        texts, held_out = [everything[:cut]], [everything[cut:]]
    train, validation = (np.array(tokenizer.encode("\n".join(part)), np.int32) for part in (texts, held_out))
    if min(len(train), len(validation)) < seq_len + 1:
        raise UsageError(
            f"--data: expected more than {20 * (seq_len + 1)} tokens for sequences of {seq_len}, found "
            f"{len(train) + len(validation)} in {str(path or 'the standard library')!r}; pass more text or a smaller --seq-len."
        )
    return train, validation
