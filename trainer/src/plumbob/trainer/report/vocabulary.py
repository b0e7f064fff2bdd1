"""The text of each token of a run, from the run's own tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import saved_checkpoints


def tokenizer_file(run_dir: Path, model: str) -> Path | None:
    """The tokenizer.json of a run: that of its final model or last checkpoint, else that of the model it began with.

    None if none of them is on this machine.
    """
    folders = [run_dir / "model", *(folder / "model" for folder in reversed(saved_checkpoints(run_dir)))]
    for folder in (*folders, Path(model_path(model))):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return _cached(model)


def _cached(model: str) -> Path | None:
    """The tokenizer.json of a model of the Hugging Face hub that was downloaded before; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "tokenizer.json")
    except (ImportError, ValueError):  # not a name that a hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def token_texts(file: Path | None, token_ids: Iterable[int]) -> dict[int, str | list[int]]:
    """Id -> text of the token; its bytes, if they are only a part of a character. Ids without a token are left out."""
    if file is None:
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    by_bytes = '"ByteLevel"' in json.dumps(json.loads(file.read_text(encoding="utf-8")).get("decoder"))
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    texts: dict[int, str | list[int]] = {}
    for number in sorted(set(token_ids)):
        token = special.get(number)
        if token is None and (piece := tokenizer.id_to_token(number)) is not None:
            token = _text(piece, by_bytes)
        if token is not None:
            texts[number] = token
    return texts


def _text(piece: str, by_bytes: bool) -> str | list[int]:
    """The text of a token of the vocabulary, or its bytes if they are no text by themselves."""
    if by_bytes:
        table = _byte_of_character()
        if any(c not in table for c in piece):
            return piece
        data = bytes(table[c] for c in piece)
    elif match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        data = bytes.fromhex(match[1])
    else:
        return piece.replace("▁", " ")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@lru_cache
def _byte_of_character() -> dict[str, int]:
    """Character -> byte, in the vocabularies of byte-level tokenizers.

    Printable bytes of Latin-1 stand for themselves; the others are the characters from number 256 on, in order (the
    convention of GPT-2's tokenizer, openai/gpt-2, src/encoder.py).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
