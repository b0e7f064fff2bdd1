"""From tasks to the batch of rollouts that a training step needs."""
