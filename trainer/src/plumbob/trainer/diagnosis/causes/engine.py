"""Causes in which the engine samples from another distribution than the one that is trained."""

from __future__ import annotations

from plumbob.trainer.diagnosis.findings import Cause

CAUSES = (
    Cause(
        "engine-trainer-mismatch",
        "Engine and trainer compute different log-probabilities for the same tokens, or tokens are drawn by other "
        "probabilities than both report: the policy that is trained is not the one that samples.",
        "Use the same model, precision, chat template and attention in engine and trainer. --importance-correction "
        "token_truncate reduces the effect but does not remove the cause.",
        ("H06",),
        "fengyao.notion.site/off-policy-rl",
        includes=(
            "temperature-not-applied",
            "sampling-truncated",
            "sampling-penalised",
            "stop-token-wrong",
            "weights-not-synced",
            "engine-stale",
            "adapter-not-applied",
            "adapter-bound-to-no-module",
            "adapter-scale-differs",
            "merged-in-bf16",
            "mismatch-grows",
            "positions-shifted",
            "head-not-tied",
            "prompt-replaced",
            "loss-mask-as-attention-mask",
            "rows-see-each-other",
            "dropout-in-training",
        ),
    ),
    Cause(
        "temperature-not-applied",
        "Engine and trainer use different temperatures: the log-probabilities, and with them the gradient, belong to "
        "another distribution than the sampled one.",
        "Compute log-probabilities at the temperature that sampled the tokens (`policy.score_rows(rows, "
        "temperature, ...)`), and start vLLM with vf-vllm or with --logprobs-mode processed_logprobs.",
        ("H06",),
        "huggingface/trl#4159",
    ),
    Cause(
        "sampling-truncated",
        "Sampling excludes unlikely tokens, or some that are banned, but the trainer's log-probabilities cover the whole "
        "vocabulary: the gradient is not that of the policy that samples.",
        "Train with --top-p 1 --top-k 0 --min-p 0, and remove the engine's own sampling defaults (a server may take "
        "them from the model's generation_config.json).",
        ("H06",),
        "huggingface/trl#6789",
    ),
    Cause(
        "empty-completions",
        "Replies come back empty much more often than the model's own probabilities allow: the server answers for it.",
        "Look in the server's log for requests that it ends or refuses at once, and at proxies, caches and retries in front "
        "of it.",
        (),
        "vllm-project/vllm#1185",
    ),
    Cause(
        "dropout-in-training",
        "Dropout is on while gradients are computed and off while rollouts are sampled: the policy that is trained is "
        "not the one that samples.",
        "Set --lora-dropout 0, which is the default.",
        ("H06",),
        "Goekdeniz-Guelmez/mlx-lm-lora#50",
    ),
    Cause(
        "correction-mutes-rollouts",
        "--importance-correction removes a large part of the gradient, because engine and trainer differ.",
        "Use --importance-correction token_truncate, which only bounds the importance weight of each token and "
        "masks nothing.",
        ("H06",),
        "huggingface/trl#5815",
    ),
    Cause(
        "rollouts-too-old",
        "A large part of the rollouts is discarded because a policy version older than --max-staleness allows "
        "sampled them.",
        "Raise --max-staleness, or sample fewer rollouts per step with a lower --batch-size or "
        "--gradient-accumulation-steps.",
        (),
        "verl-project/verl#7495",
    ),
    Cause(
        "drops-are-biased",
        "The rollouts that training leaves out (as too old, failed, timed out, cut off and masked, or for no known reason) are "
        "much longer than those that it keeps, or earn less or more: the policy learns from the others alone.",
        "Raise the limit that the evidence names (--max-staleness, --max-seconds, --max-tool-seconds or --max-tokens), "
        "use --overlong keep, or sample fewer rollouts per step with a lower --batch-size or "
        "--gradient-accumulation-steps, until few rollouts are left out.",
        ("H05",),
        "thinking-machines-lab/tinker-cookbook#822",
        symptom=True,
    ),
    Cause(
        "adapter-not-applied",
        "The engine holds the LoRA adapter but does not compute with it: every rollout comes from the base model.",
        "Request completions under the adapter's name, and make sure that the adapter is active and not unmerged when "
        "the engine samples.",
        ("H06",),
        "verl-project/verl#7495, huggingface/trl#2856",
    ),
    Cause(
        "adapter-bound-to-no-module",
        "The LoRA adapter's tensors match no module of the engine's model: weight syncs change nothing in the "
        "rollouts.",
        "Compare the names of the adapter's tensors with the names of the engine's modules, and rename the tensors "
        "to match; make the engine raise an error for unknown names.",
        ("H06",),
        "verl-project/verl-omni#552",
    ),
    Cause(
        "weights-not-synced",
        "The engine does not sample with the trainer's weights after a weight sync: rollouts come from a policy that "
        "never changes, or that changes only in part.",
        "Find the tensors that do not arrive: run `doctor ENV` with this run's options, because its sync probe "
        "counts them for an engine in the trainer's process. With vLLM, try another --vllm-sync.",
        ("H06",),
        "OpenRLHF/OpenRLHF#1349",
    ),
    Cause(
        "engine-stale",
        "The engine samples with old weights, from before the last weight sync.",
        "After every weight sync, check that the engine serves the new weights before sampling, and clear its "
        "prefix cache (`engine.forget()`; vLLM: POST /reset_prefix_cache).",
        ("H06",),
        "verl-project/verl#7495",
    ),
    Cause(
        "merged-in-bf16",
        "The engine receives weights that are rounded to bfloat16, which loses most of a small update: rollouts do "
        "not show what early training changes.",
        "Sync the adapter itself (with --peft, --vllm-sync lora is the default), or merge the adapter and send the "
        "weights in float32.",
        ("H06",),
        "huggingface/trl#6688",
    ),
    Cause(
        "mismatch-grows",
        "Engine and trainer agreed at first and differ more and more, although weight syncs arrive: rounding that depends "
        "on the policy, or on what else is in a batch, biases the gradient.",
        "With vLLM, turn cascade attention off (--disable-cascade-attn) and compute in float16 instead of bfloat16; keep "
        "--temperature 1 and --importance-correction token_truncate.",
        ("H06",),
        "vllm-project/vllm#22103, OpenRLHF/OpenRLHF#1155",
    ),
    Cause(
        "positions-shifted",
        "Engine or trainer (the evidence says which) gives tokens other positions than the model was made for: it "
        "computes another distribution.",
        "Give each row positions from 0 in steps of 1, over prompt, completions and tool results alike; a row in a packed "
        "batch begins at 0 again, and padding on the left does not count.",
        ("H02", "H06"),
    ),
    Cause(
        "adapter-scale-differs",
        "The engine multiplies the LoRA adapter by another number than the trainer: it samples from a policy that is "
        "further from the base model, or nearer to it, than the one that is trained.",
        "Use the same lora_alpha / r in engine and trainer: check lora_alpha in the adapter_config.json that the engine "
        "reads, and that rank-stabilised scaling (alpha / sqrt(r)) is on in both or in neither.",
        ("H06",),
        "vllm-project/vllm#10798",
    ),
    Cause(
        "head-not-tied",
        "The model's output embeddings are its input embeddings (tied), but engine or trainer computes logits with a "
        "tensor of its own, which other weights reach, or none.",
        "Load the model with tie_word_embeddings as its config.json has it, in engine and trainer, and tie the weights "
        "again (`model.tie_weights()`) after weights are loaded or replaced.",
        ("H06",),
        "huggingface/transformers#43429, vllm-project/vllm#51665",
    ),
    Cause(
        "prompt-replaced",
        "The engine samples after another prompt than the one it was given, or after a part of it: rows hold the given prompt, "
        "so the trainer scores every completion in a context in which it was not sampled.",
        "Send token ids to the engine, not text or messages; switch off what a server adds (a start token, a system "
        "prompt, its own chat template) or cuts off, and do not change ids on the way.",
        ("H02", "H04", "H07"),
        "huggingface/trl#3853",
        includes=("truncated-context", "tools-not-in-prompt", "assistant-header-missing", "template-applied-twice"),
    ),
    Cause(
        "saved-model-differs",
        "The model that a run saves is not the one that it trained: loaded afresh, it gives other log-probabilities, or it is "
        "an earlier checkpoint, chosen by a metric that does not say what a model earns.",
        "If --keep-best chose it, use --keep-best eval/greedy or reward/mean. If not, save the weights that are trained, "
        "with the adapter merged at the trainer's own scale (lora_alpha / r) and in "
        "float32, tie the embeddings again, and load what was saved before it is used.",
        ("H06",),
        "PrimeIntellect-ai/prime-rl#1456, unslothai/unsloth#2009",
    ),
    Cause(
        "sampling-penalised",
        "The engine samples with penalties on tokens that the text already has (repetition, presence or frequency), or with "
        "a bias on some tokens, and the trainer computes log-probabilities without them: the gradient is not that of the "
        "policy that samples.",
        "Remove the penalties and the logit bias: start vLLM with --generation-config vllm (vf-vllm does), or take "
        "repetition_penalty and the like out of the model's generation_config.json and of the server's defaults.",
        (),
        "NVIDIA-NeMo/RL#3497; verl-project/verl#7270",
    ),
)
