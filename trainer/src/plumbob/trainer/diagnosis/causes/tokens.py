"""Causes in the tokens: rows that are not what the model saw and sampled, or log-probabilities of other rows."""

from __future__ import annotations

from plumbob.trainer.diagnosis.findings import Cause

CAUSES = (
    Cause(
        "tools-not-in-prompt",
        "Tool descriptions are missing from the engine's prompt or from the prompt in the trained row.",
        "Describe the tools in the first prompt, and use the same prompt for sampling and for training: pass the same "
        "`tools` to `apply_chat_template`, or put their descriptions into the system message.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "assistant-header-missing",
        "The chat template's header that opens an assistant turn is missing before sampled turns: they are sampled in "
        "one context and trained in another.",
        "Render each prompt with `add_generation_prompt=True`, and build the row from the engine's own ids: prompt "
        "and completion of each turn, verbatim.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "retokenised-turns",
        "Sampled turns were decoded and tokenised again: the trained ids are not the sampled ids, so their "
        "log-probabilities belong to other tokens.",
        "Append the sampled ids verbatim to the next prompt and to the row; never tokenise a sampled turn again.",
        ("H02", "H07"),
        "huggingface/trl#5224",
    ),
    Cause(
        "row-not-what-was-sampled",
        "The token ids or sampling log-probabilities of the trained row differ from what the engine saw and returned.",
        "Build the row from the engine's own ids and log-probabilities: prompt and completion of each turn, verbatim.",
        ("H02",),
        includes=("retokenised-turns", "assistant-header-missing", "tools-not-in-prompt", "rollouts-repeated"),
    ),
    Cause(
        "context-tokens-trained",
        "Tokens that the environment wrote (tool results, prompts, headers) are in the loss: the model learns to "
        "imitate the tools instead of using them.",
        "Set `Sample.loss_mask` to true exactly where a token was sampled, and to false for every other token.",
        ("H02",),
        "NVIDIA-NeMo/RL#2176",
    ),
    Cause(
        "sampled-tokens-masked",
        "Tokens that the model sampled are left out of the loss: training does not reach the decisions in them.",
        "Set `Sample.loss_mask` to true exactly where a token was sampled, in every turn of the rollout. If it is, look for "
        "log-probabilities that the loss gets without their gradient, and for processes whose gradients are not added.",
        ("H02", "H07"),
        "huggingface/trl#4970",
    ),
    Cause(
        "loss-mask-as-attention-mask",
        "The trainer scores sampled tokens without seeing what comes before them: other prompts or tool results give "
        "the same log-probabilities. This happens if the loss mask is passed as the attention mask.",
        "Pass the model an attention mask that covers every token of the row, and use the loss mask only in the loss.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "rows-see-each-other",
        "A token's log-probability depends on other rows of its microbatch, or on later tokens of its own row.",
        "Use an attention implementation that is causal and stops at the row boundaries of a packed microbatch.",
        ("H02",),
    ),
    Cause(
        "loss-mask-shifted",
        "The loss is on other positions of the row than the loss mask says, in the backward pass alone or everywhere: "
        "tokens that were not sampled are trained, and sampled ones are not.",
        "The logits that score token t are those after token t - 1: shift logits, ids and mask exactly once, by one and "
        "in the same direction.",
        ("H02",),
        "PrimeIntellect-ai/prime-rl#1525, huggingface/trl#3681",
    ),
    Cause(
        "logprobs-permuted",
        "Log-probabilities that are compared with each other belong to different tokens (shifted, or in another order): "
        "importance ratios are noise, and clipping removes tokens at random.",
        "Keep sampling and old log-probabilities in the order of the row's tokens, and split and join microbatches in the "
        "same order.",
        ("H02",),
        "modelscope/ms-swift#8196",
    ),
    Cause(
        "template-applied-twice",
        "Messages hold tokens of the chat template: texts that were rendered already are rendered again, and the model "
        "sees several conversations inside one message.",
        "Give the environment plain messages, and let the chat template render them once.",
        ("H02",),
        "google/tunix#1419",
    ),
)
