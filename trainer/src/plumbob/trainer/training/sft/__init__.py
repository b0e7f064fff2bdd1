"""What supervised fine-tuning has of its own: its rows, made before the first step, and its training step."""
