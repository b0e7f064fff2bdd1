"""The model that is trained: loading, LoRA, packed forward passes, log-probabilities of sampled tokens."""
