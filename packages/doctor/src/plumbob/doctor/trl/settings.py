"""What a GRPOTrainer of TRL was told to do, by the record's neutral names, and what of it cannot be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from plumbob.doctor import stages
from plumbob.doctor.environment.player import place_of
from plumbob.doctor.record import Settings
from plumbob.doctor.stages import Examined, Outcome

REDUCTIONS: dict[str, Any] = {
    "grpo": "rows",
    "dr_grpo": "constant",
    "bnpo": "minibatch_tokens",
    "dapo": "step_tokens",
    "cispo": "step_tokens",
}
"""`loss_type` -> how tokens are weighted; other losses are not compared."""
Stage = Callable[[Examined], Outcome | list[Outcome]]


STAGES: tuple[Stage, ...] = (
    stages.prompts,
    stages.rows,
    stages.engine_logprobs,
    stages.trainer_logprobs,
    stages.draws,
    stages.pairing,
    stages.advantage,
    stages.reference_policy,
    stages.slopes,
    stages.gradient,
    stages.trained_tensors,
    stages.update,
)
"""Stages of a record of TRL, in the order of the data. TRL states no weight of a single token: its slope is compared."""
ADAMW = ("adamw_torch", "adamw_torch_fused")


def settings_of(trainer: Any, step: int) -> Settings:
    """The settings of training step `step` (from 0).

    A schedule of transformers may have any form, so the record has the rate of its own step, as the schedule gives it.
    """
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    weights_in = next(model.parameters()).dtype
    sequence, cispo = args.importance_sampling_level == "sequence", args.loss_type == "cispo"
    beta = float(trainer.beta)
    return Settings(
        model=str(model.config.name_or_path),
        # vLLM has another implementation of the model, which agrees with the trainer's as bfloat16 does.
        precision="bfloat16" if args.bf16 or weights_in == torch.bfloat16 or args.use_vllm else "float32",
        temperature=args.temperature,
        max_tokens=args.max_completion_length,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        chat_template=trainer.chat_template or getattr(trainer.processing_class, "chat_template", None) or "",
        group_size=args.num_generations,
        scale="batch_rewards" if args.scale_rewards == "batch" else args.scale_rewards,
        components=trainer.multi_objective_aggregation,
        overlong="mask" if args.mask_truncated_completions else "keep",
        loss=args.loss_type,
        reduction=REDUCTIONS.get(args.loss_type, "rows"),
        ratio="sequence" if sequence else "token",
        bound="cap" if cispo else "clip",
        epsilon=args.epsilon,
        epsilon_high=(args.epsilon if args.epsilon_high is None else args.epsilon_high) - (1.0 if cispo else 0.0),
        delta=args.delta,
        kl_beta=beta,
        # The derivative of ratio x k3 is ratio x the log-ratio to the reference, which is that of k2.
        kl_estimator="k2" if args.use_bias_correction_kl else "k3",
        kl_ratio=bool(args.use_bias_correction_kl),
        learning_rate=rate(args, trainer.state.max_steps, step),
        num_steps=trainer.state.max_steps,
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        epsilon_adam=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_norm=args.max_grad_norm or 0.0,
        num_minibatches=max(args.steps_per_generation // args.gradient_accumulation_steps, 1),
        num_iterations=args.num_iterations,
        **_adapter(model),
    )


def narrowing(args: Any) -> dict[str, float]:
    """The settings that leave tokens out of the sampling, by name."""
    given = {"top_p": args.top_p or 1, "top_k": args.top_k or 0, "min_p": args.min_p or 0}
    return {name: value for name, value in given.items() if value != (1 if name == "top_p" else 0)}


def _adapter(model: Any) -> dict[str, Any]:
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if config is None:
        return {}
    targets = config.target_modules
    return {
        "adapter": "lora",
        "lora_rank": config.r,
        "lora_alpha": config.lora_alpha * (config.r**0.5 if config.use_rslora else 1.0),
        "lora_dropout": config.lora_dropout,
        "lora_targets": [targets] if isinstance(targets, str) else sorted(targets or ()),
    }


def rate(args: Any, num_steps: int, step: int) -> float:
    """The learning rate that transformers' schedule has in a step, from the arguments alone."""
    from transformers import get_scheduler

    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule = get_scheduler(
        args.lr_scheduler_type,
        unused,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs or None,
    )
    functions = getattr(
        schedule, "lr_lambdas", None
    )  # all but a few of transformers' schedules are functions of the step
    return args.learning_rate * functions[0](step) if functions else float("nan")


def refusal(trainer: Any) -> str | None:
    """Why steps of this trainer are not recorded at all; None if they are."""
    args, kind = trainer.args, str(trainer.accelerator.distributed_type)
    generated = args.steps_per_generation * args.num_iterations
    for applies, why in (
        (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled, f"training with {kind.rpartition('.')[2]}"),
        (args.fp16, "training with fp16, which scales gradients"),
        (trainer._is_vlm, "a model that reads images"),
        (
            generated % args.gradient_accumulation_steps != 0,
            "completions that are generated more than once in an optimizer step (steps_per_generation x num_iterations is no "
            "multiple of gradient_accumulation_steps)",
        ),
    ):
        if applies:
            return f"Steps are not recorded: {why} is not supported yet."
    return None


def unseen(trainer: Any) -> tuple[list[str], set[Stage]]:
    """(a sentence for each thing that a record of this trainer does not show, the stages that are left out for it)."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    plain_adapter = config is None or (
        str(getattr(config.peft_type, "value", config.peft_type)) == "LORA" and not config.use_dora
    )
    loss_options = {
        f"loss_type={args.loss_type!r}": args.loss_type not in REDUCTIONS,
        f"top_entropy_quantile={args.top_entropy_quantile:g}": args.top_entropy_quantile < 1,
        "an entropy bonus": bool(trainer._entropy_bonus_enabled),
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "use_bias_correction_kl with ratios of whole completions": bool(
            args.use_bias_correction_kl and trainer.beta and args.importance_sampling_level == "sequence"
        ),
        "the auxiliary loss of a mixture of experts": bool(trainer.aux_loss_enabled),
    }
    other = [name for name, on in loss_options.items() if on]
    table: tuple[tuple[bool, str, set[Stage]], ...] = (
        (
            bool(trainer.use_transformers_continuous_batching) or trainer.rollout_func is not None,
            "Completions do not come from transformers' generate(), so how they were sampled was not examined.",
            {stages.engine_logprobs, stages.draws},
        ),
        (bool(other), f"The loss was not compared with its formula, because of {', '.join(other)}.", {stages.slopes}),
        (
            args.multi_objective_aggregation != "sum_then_normalize",
            f"Advantages with multi_objective_aggregation={args.multi_objective_aggregation!r} were not compared.",
            {stages.advantage},
        ),
        (
            not plain_adapter,
            "Log-probabilities and gradients of an adapter other than plain LoRA were not compared.",
            {stages.engine_logprobs, stages.trainer_logprobs, stages.draws, stages.gradient, stages.trained_tensors},
        ),
        (
            trainer.optimizer is not None or str(getattr(args.optim, "value", args.optim)) not in ADAMW,
            "Updates of another optimizer than TRL's own AdamW were not compared.",
            {stages.update},
        ),
        (
            any(not p.requires_grad for p in model.parameters()) and config is None,
            "A part of the weights is frozen; whether the right ones are was not examined.",
            {stages.trained_tensors},
        ),
    )
    return (
        [sentence for applies, sentence, _ in table if applies],
        set().union(*(left for applies, _, left in table if applies)),
    )


def tokenizer_of(trainer: Any) -> Any:
    """The trainer's tokenizer, rendering conversations as the trainer does. A copy: the trainer's own stays as it is."""
    import copy

    tokenizer = copy.copy(trainer._tokenizer)
    tokenizer.chat_template = trainer.chat_template or tokenizer.chat_template
    if trainer.chat_template_kwargs:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **trainer.chat_template_kwargs)
    return tokenizer


OTHERS = ("trl.", "transformers.", "builtins", "torch.", "abc", "typing")
METHODS = {
    "rows": ("_generate_and_score_completions", "_generate", "_tool_call_loop"),
    "logprobs": ("_get_per_token_logps_and_entropies", "_generate_single_turn"),
    "sampling": ("_generate_single_turn", "_generate"),
    "advantages": ("_generate_and_score_completions", "_calculate_rewards", "_get_train_sampler"),
    "loss": ("_compute_loss", "compute_loss", "_generate_and_score_completions"),
    "gradient": ("training_step", "_compute_loss", "compute_loss"),
    "optimizer": ("create_optimizer", "create_scheduler", "training_step"),
}
"""Stage -> methods of GRPOTrainer that decide it, of which a subclass may have its own."""


def places(trainer: Any) -> dict[str, str]:
    """Stage -> where a subclass's own method that decides it is; `grading`: where the reward function is, if there is one."""
    own = {
        name: value
        for one in type(trainer).__mro__[::-1]
        if not one.__module__.startswith(OTHERS)
        for name, value in vars(one).items()
    }
    found = {
        stage: place_of(own[next(n for n in names if n in own)])
        for stage, names in METHODS.items()
        if own.keys() & set(names)
    }
    return {**found, "grading": place_of(trainer.reward_funcs[0]) if len(trainer.reward_funcs) == 1 else ""}
