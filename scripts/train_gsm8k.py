"""`train`, `evaluate`, `predict` and `benchmark` of gsm8k as a script, for `accelerate launch` and older command lines.

    accelerate launch --num-processes 2 scripts/train_gsm8k.py train --model MODEL --batch-size 16
    python scripts/train_gsm8k.py evaluate --model MODEL

`train` has the settings of configs/gsm8k.toml where the command line, or --config, gives no others.
"""

from pathlib import Path

from plumbob.trainer.cli.script import run

if __name__ == "__main__":
    run("gsm8k", Path(__file__).parents[1] / "configs" / "gsm8k.toml")
