"""Small random BERTs, as embedding models and cross-encoders, that tests of retrieval make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_bert(
    folder: Path, words: Sequence[str], kind: str = "BertModel", *, half: bool = False, **settings: Any
) -> Path:
    """Write a random model of transformers' class `kind`, one token a word, into the new `folder`; returns the folder.

    `settings`: of BertConfig, in place of one layer of 16 dimensions. `half`: store the weights in 16 bits.
    """
    import torch
    import transformers

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    given = {**sizes, "max_position_embeddings": 64, "initializer_range": 0.5, **settings}
    config = transformers.BertConfig(vocab_size=5 + len(words), **given)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
    (model.bfloat16() if half else model).save_pretrained(folder)
    return folder
