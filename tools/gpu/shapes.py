"""Shapes of Qwen2.5, and models of these shapes with random weights: one table for all measurements.

    python3 tools/gpu/shapes.py 7b TOKENIZER_FOLDER /tmp/random-7b

writes a model with random weights in bfloat16, with the tokenizer of a folder or of a bundled model. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

QWEN: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "cpu": {
        "hidden_size": 896,
        "intermediate_size": 600,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "vocab_size": 2000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 2000,
    },
}
"""Sizes from Qwen2.5's config.json files; `cpu` and `tiny` are small shapes to try a script without a GPU.

Sizes that are left out: two key-value heads, 151,936 tokens, tied embeddings.
"""


WEIGHT_MAP = "model.safetensors.index.json"


def qwen_config(shape: str | dict[str, Any], **fields: Any) -> Any:
    """The configuration of a shape: a name in `QWEN`, or sizes. `fields`: further ones, which come first."""
    from transformers import Qwen2Config  # here, because scripts read the table without waiting for transformers

    sizes = QWEN[shape] if isinstance(shape, str) else shape
    return Qwen2Config(
        **{"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, **sizes, **fields}
    )


def write_random(shape: str, tokenizer: str, out: Path) -> None:
    """Write a model of `shape` with random weights in bfloat16 to the folder `out`.

    `tokenizer`: the folder whose tokenizer and chat template it gets, or the name of a bundled model.
    """
    import torch
    from plumbob.trainer.run_files.model_path import model_path
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    source = model_path(tokenizer)
    own = AutoTokenizer.from_pretrained(source)
    config = qwen_config(shape, eos_token_id=own.eos_token_id, bos_token_id=None, pad_token_id=own.pad_token_id)
    # Qwen2.5's own context and base of the rotary embedding: vLLM refuses a context beyond the first.
    config.max_position_embeddings = 32768
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    if len(own) > config.vocab_size:
        raise SystemExit(f"the tokenizer has {len(own)} tokens, and the shape {shape} {config.vocab_size}")
    torch.manual_seed(0)
    # In bfloat16 from the start: a 7B in float32 would take twice the time and memory, only to be rounded.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size="100GB")
    for path in Path(source).iterdir():  # the tokenizer's files, and the generation config with its stop tokens
        if path.suffix in (".json", ".jinja", ".txt") and path.name not in ("config.json", WEIGHT_MAP):
            shutil.copy(path, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=QWEN)
    parser.add_argument("tokenizer", help="folder with a tokenizer, or the name of a bundled model")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    write_random(args.shape, args.tokenizer, args.out)
    print(f"random weights in {args.shape}: {args.out}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
