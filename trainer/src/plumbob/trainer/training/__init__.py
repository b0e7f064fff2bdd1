"""A GRPO run: set-up, the training step, checkpoints."""
