"""What a user of TRL calls the doctor's neutral names, and what to do about a cause in a script of TRL."""

from __future__ import annotations

import re

WORDS = {
    "the reduction rows": 'the weights of loss_type="grpo"',
    "the reduction constant": 'the weights of loss_type="dr_grpo"',
    "the reduction minibatch_tokens": 'the weights of loss_type="bnpo"',
    "the reduction step_tokens": 'the weights of loss_type="dapo"',
    "overlong mask": "mask_truncated_completions=True",
    "overlong keep": "mask_truncated_completions=False",
    "--kl-beta": "beta",
    "--warmup-steps": "warmup_steps",
    "minibatch": "optimizer step",
    "the settings": "the GRPOConfig",
}
"""The doctor's words -> those of GRPOConfig."""

REMEDIES = {
    "few-distinct-tasks": "Train on more different prompts.",
    "answers-not-parsed": (
        "Compare with the final answer: take it out of the column (the part behind ####, for example) before training, or in "
        "the reward function, and read it from the completion in the form that the prompt asks for."
    ),
    "calls-not-read": (
        "Print a few completions. If they hold calls in another form, set processing_class.response_template to it; if they hold "
        "none, use a model that calls tools, ask for calls in the prompt, or teach them first with SFTTrainer."
    ),
    "held-out-in-training": "Split the data before anything else (train_test_split), and remove rows that both parts have.",
    "evaluation-differs": "Give eval_dataset the same prompt and system message as train_dataset.",
    "weights-not-synced": (
        "Look at what generates: a copy of the model or a vLLM that is not updated (vllm_generation.sync_weights, which runs "
        "before generation), or an adapter that is not merged into what it is sent."
    ),
    "adapter-scale-differs": "Merge the adapter once before weights are sent, and unmerge it after; compare lora_alpha / r.",
    "prompt-incomplete": (
        "Give the trainer conversations (a column `prompt` of messages), not texts that were rendered before, and look "
        "at chat_template_kwargs, `tools=` and the chat template of processing_class."
    ),
    "row-not-what-was-sampled": (
        "Look at what stands between generation and loss: a subclass of GRPOTrainer, a rollout_func, or a tokenizer "
        "whose template changes earlier turns."
    ),
    "loss-mask-wrong": (
        "Look at what makes completion_mask and tool_mask: a subclass of GRPOTrainer, or `env_mask` of a rollout_func, "
        "which is 0 for tokens that the model did not write."
    ),
    "engine-trainer-mismatch": (
        "Compare what generates with what trains: dtype, attn_implementation, use_liger_kernel, cast_lm_head_to_fp32 "
        "and, with vLLM, vllm_importance_sampling_correction."
    ),
    "temperature-not-applied": (
        "Give one `temperature` in GRPOConfig, none in generation_kwargs, and divide logits by trainer.temperature "
        "where a subclass computes log-probabilities itself."
    ),
    "sampling-altered": (
        "Remove top_k, top_p, min_p and repetition_penalty from GRPOConfig and generation_kwargs: the loss counts on "
        "completions from the model's whole distribution."
    ),
    "stop-token-wrong": (
        "Set processing_class.eos_token (or eos_token_id in generation_kwargs) to the token with which the chat "
        "template ends a turn."
    ),
    "dropout-in-training": "Set disable_dropout=True in GRPOConfig, and lora_dropout=0 in LoraConfig.",
    "groups-without-variety": "Raise temperature, and look for a seed, do_sample=False or num_beams in generation_kwargs.",
    "truncated-rollouts": (
        "Raise max_completion_length, shorten what the prompt asks for, or set mask_truncated_completions=True."
    ),
    "reward-wrong": (
        "Print what each reward function is given and returns for a few completions: its arguments are `prompts`, "
        "`completions`, `completion_ids` and the columns of the data set by name, in lists of one entry for each "
        "completion."
    ),
    "oracle-fails": (
        "Give the reward function the right answer of a row by hand, in the form that `completions` has (a list of "
        "messages for a conversation, else a text), and correct it until it earns the most."
    ),
    "advantages-wrong": (
        "Look at a subclass that computes advantages, or a data loader that parts the num_generations rows of a prompt."
    ),
    "tiny-std-scaling": 'Set scale_rewards="none" or "batch", or make rewards differ by more than noise.',
    "loss-differs-from-settings": (
        "Look at a subclass that overrides compute_loss or _compute_loss, and compare it with loss_type, epsilon, "
        "epsilon_high, delta and importance_sampling_level."
    ),
    "kl-term-wrong": (
        "Set sync_ref_model=False (or ref_model_sync_steps and ref_model_mixup_alpha so that the reference stays "
        "behind), and look at what changes trainer.ref_model or a subclass's KL term."
    ),
    "kl-too-large": "Lower beta, or set it to 0.",
    "no-gradient": (
        "Look at which parameters require a gradient, at detach() and no_grad() in a subclass, and at what freezes "
        "layers."
    ),
    "not-finite": (
        "Return finite rewards (None for a completion that cannot be scored), lower learning_rate, and set "
        "max_grad_norm."
    ),
    "update-differs-from-settings": (
        "Load the model with model_init_kwargs={'dtype': 'float32'} (bf16=True still computes in bfloat16), and look at "
        "`optimizers=`, optimizer_cls_and_kwargs and callbacks that change weights or gradients."
    ),
    "schedule-hides-rate": (
        'Look at lr_scheduler_type, warmup_steps and `optimizers=`; lr_scheduler_type="constant" keeps the rate.'
    ),
    "learning-rate-too-low": (
        "Raise learning_rate: the default of 1e-6 is for all weights; LoRA needs ten times or more, such as 1e-5 to "
        "1e-4."
    ),
    "learning-rate-too-high": "Lower learning_rate, or set max_grad_norm.",
    "never-succeeds": (
        "Give easier prompts, a reward with steps between 0 and 1, a model that sometimes succeeds, or a larger "
        "max_completion_length if completions are cut off."
    ),
    "too-little-signal": "Raise num_generations or temperature, and leave out prompts whose completions all earn the same.",
    "policy-breaks": "Lower learning_rate, set max_grad_norm, or raise beta.",
    "behaviour-narrows": "Lower learning_rate, raise temperature, or set epsilon_high above epsilon.",
}
"""Id of a cause -> what to do, in options and parts of TRL."""


def in_words_of_trl(text: str) -> str:
    for ours, theirs in WORDS.items():
        text = re.sub(rf"(?<!\w){re.escape(ours)}\b", theirs, text)
    return text
