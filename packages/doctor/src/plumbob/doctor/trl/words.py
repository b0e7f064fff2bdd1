"""What to do about a cause in a script of TRL."""

from __future__ import annotations

REMEDIES = {
    "few-distinct-tasks": "Train on more different prompts.",
    "calls-not-read": "Set processing_class.response_template to the form of the model's calls, or teach calls with SFTTrainer.",
    "held-out-in-training": "Split the data first (train_test_split), and remove rows that both parts have.",
    "evaluation-differs": "Give eval_dataset the same prompt and system message as train_dataset.",
    "weights-not-synced": "Look at what generates: a stale copy, an adapter that is merged twice or not; compare lora_alpha / r.",
    "prompt-incomplete": "Give conversations, no rendered texts; look at chat_template, chat_template_kwargs and `tools=`.",
    "row-not-what-was-sampled": "Look between generation and loss: a subclass, a rollout_func, a template that changes turns.",
    "loss-mask-wrong": "Look at what makes completion_mask and tool_mask: a subclass, or `env_mask` of a rollout_func.",
    "engine-trainer-mismatch": "Compare generation with training: dtype, attn_implementation, use_liger_kernel, vLLM's dtype.",
    "temperature-not-applied": "Give one `temperature`, in GRPOConfig, and divide logits by it where a subclass scores.",
    "sampling-altered": "Remove top_k, top_p, min_p and repetition_penalty from GRPOConfig and generation_kwargs.",
    "stop-token-wrong": "Set processing_class.eos_token to the token with which the chat template ends a turn, and keep it.",
    "dropout-in-training": "Set disable_dropout=True in GRPOConfig, and lora_dropout=0 in LoraConfig.",
    "groups-without-variety": "Raise temperature, and look for a seed, do_sample=False or num_beams in generation_kwargs.",
    "truncated-rollouts": "Raise max_completion_length or ask for less; mask_truncated_completions trains the others alone.",
    "oracle-fails": "Score right answers of your data by hand: look at what a reward function parses, and at the column.",
    "reward-wrong": "Print what each reward function is given for a few completions (lists, one entry each) and returns.",
    "advantages-wrong": "Look at a subclass that computes advantages, or a data loader that parts the rows of a prompt.",
    "tiny-std-scaling": 'Set scale_rewards="none" or "batch", or make rewards differ by more than noise.',
    "loss-differs-from-settings": "Compare a subclass's (_)compute_loss with loss_type, epsilon, epsilon_high and delta.",
    "kl-term-wrong": "Set sync_ref_model=False, and look at what changes trainer.ref_model or the KL term.",
    "kl-too-large": "Lower beta, or set it to 0.",
    "no-gradient": "Look at which parameters require a gradient, at detach() and no_grad(), and at what freezes layers.",
    "not-finite": "Return finite rewards (None for what cannot be scored), lower learning_rate, set max_grad_norm.",
    "update-differs-from-settings": "Load float32 weights (model_init_kwargs={'dtype': 'float32'}); look at `optimizers=`.",
    "schedule-hides-rate": 'Look at lr_scheduler_type, warmup_steps and `optimizers=`; "constant" keeps the rate.',
    "learning-rate-too-low": "Raise learning_rate: 1e-6, the default, is for all weights; LoRA needs 1e-5 to 1e-4.",
    "learning-rate-too-high": "Lower learning_rate, or set max_grad_norm.",
    "never-succeeds": "Give easier prompts, a reward with steps, a better model, or a larger max_completion_length.",
    "too-little-signal": "Raise num_generations or temperature, and leave out prompts whose completions all earn the same.",
    "saved-model-differs": "Look at a subclass's save_model: it must write trainer.model, with its adapter or merged with it.",
    "policy-breaks": "Lower learning_rate, set max_grad_norm, or raise beta.",
}
"""Id of a cause -> what to do, in options and parts of TRL."""
