"""The processes of a run, and how they share the weights: replicated, FSDP2, DeepSpeed ZeRO."""
