"""`train`, `evaluate`, `predict` and `benchmark` of musique as a script, for `accelerate launch` and older command lines.

    accelerate launch --num-processes 2 scripts/train_musique.py train --model MODEL --batch-size 16
    python scripts/train_musique.py evaluate --model MODEL

`train` has the settings of configs/musique.toml where the command line, or --config, gives no others.
"""

from pathlib import Path

from plumbob.trainer.cli.script import run

if __name__ == "__main__":
    run("musique", Path(__file__).parents[1] / "configs" / "musique.toml")
