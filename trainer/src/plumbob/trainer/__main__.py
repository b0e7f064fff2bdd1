"""`python -m plumbob.trainer` is `train`: what `accelerate launch -m` and `torchrun -m` start."""

from plumbob.trainer.cli.train import main

if __name__ == "__main__":
    main()
