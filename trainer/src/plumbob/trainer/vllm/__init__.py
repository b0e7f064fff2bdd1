"""vLLM as the training engine: `vf-vllm` starts servers, `VllmEngine` draws from them and keeps their weights the trainer's.

Nothing here imports vllm when it is imported: the servers run in processes of their own, and only the NCCL transfer
needs vLLM's library beside the trainer.
"""
