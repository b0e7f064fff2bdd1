"""What a GRPOTrainer of TRL was told to do, by the record's neutral names, and what of it cannot be compared."""

from __future__ import annotations

import functools
from typing import Any

import torch
from plumbob.doctor import stages
from plumbob.doctor.environment.player import place_of
from plumbob.doctor.record import Settings
from plumbob.doctor.stages import Stage

REDUCTIONS: dict[str, Any] = {
    "grpo": "rows",
    "dr_grpo": "constant",
    "bnpo": "minibatch_tokens",
    "dapo": "step_tokens",
    "cispo": "step_tokens",
}
"""`loss_type` -> how tokens are weighted; other losses are not compared."""
STAGES: tuple[Stage, ...] = tuple(
    stage for stage in stages.STAGES if stage not in (stages.weights, stages.corrections, stages.served)
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
    warmup, more = args.get_warmup_steps(num_steps), args.lr_scheduler_kwargs or None
    schedule = get_scheduler(args.lr_scheduler_type, unused, warmup, num_steps, more)
    functions = getattr(schedule, "lr_lambdas", None)  # all but a few of these schedules are functions of the step
    return args.learning_rate * functions[0](step) if functions else float("nan")


def refusal(trainer: Any) -> str | None:
    """Why steps of this trainer are not recorded at all; None if they are."""
    args, kind = trainer.args, str(trainer.accelerator.distributed_type)
    generated = args.steps_per_generation * args.num_iterations
    multiple = "steps_per_generation x num_iterations is no multiple of gradient_accumulation_steps"
    table = (
        (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled, f"training with {kind.rpartition('.')[2]}"),
        (args.fp16, "training with fp16, which scales gradients"),
        (trainer._is_vlm, "a model that reads images"),
        (generated % args.gradient_accumulation_steps, f"more than one generation in an optimizer step: {multiple}"),
    )
    why = next((why for applies, why in table if applies), "")
    return f"Steps are not recorded, because this is not supported yet: {why}." if why else None


def text_of(option: Any) -> str:
    """The text of an option that may be a member of an enumeration."""
    return str(getattr(option, "value", option))


def dropout(trainer: Any) -> dict[str, float]:
    """Where the trainer's model drops activations at random -> the share; TRL does it while it generates, too."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapter = _adapter(model).get("lora_dropout", 0.0)
    own = [m.p for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and "lora_dropout" not in n]
    shares = {"the adapter": adapter, "the model": max([*own, getattr(model.config, "attention_dropout", 0.0) or 0.0])}
    return {name: share for name, share in shares.items() if share > 0}


def unseen(trainer: Any) -> tuple[list[str], set[Stage]]:
    """(a sentence for each thing that a record of this trainer does not show, the stages that are left out for it)."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    kind = "" if config is None else text_of(config.peft_type)
    sequence, dropped = args.importance_sampling_level == "sequence", dropout(trainer)
    loss_options = {
        f"loss_type={args.loss_type!r}": args.loss_type not in REDUCTIONS,
        f"top_entropy_quantile={args.top_entropy_quantile:g}": args.top_entropy_quantile < 1,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "use_bias_correction_kl with whole ratios": args.use_bias_correction_kl and trainer.beta and sequence,
        "the auxiliary loss of a mixture of experts": trainer.aux_loss_enabled,
    }
    other = ", ".join(name for name, on in loss_options.items() if on)
    elsewhere = trainer.use_transformers_continuous_batching or trainer.rollout_func is not None
    other_optimizer = trainer.optimizer is not None or text_of(args.optim) not in ADAMW
    frozen = config is None and any(not p.requires_grad for p in model.parameters())
    drawn, scored = {stages.engine_logprobs, stages.draws}, {stages.engine_logprobs, stages.trainer_logprobs}
    of_weights = {stages.gradient, stages.trained_tensors}
    table: tuple[tuple[Any, str, Any], ...] = (
        (elsewhere, "how completions are sampled that do not come from transformers' generate()", drawn),
        (dropped, f"log-probabilities, because {' and '.join(dropped)} drops activations", scored | {stages.gradient}),
        (max(dropped.values(), default=0) > stages.DROPOUT, "what is sampled, for the same reason", drawn),
        (other, f"the loss with its formula, because of {other}", {stages.slopes}),
        (kind and (kind != "LORA" or getattr(config, "use_dora", False)), "what the adapter computes: it is no plain LoRA",
         drawn | scored | of_weights),
        (other_optimizer, "updates of another optimizer than AdamW", {stages.update}),
        (frozen, "which weights are trained: a part is frozen", {stages.trained_tensors}),
    )  # fmt: skip
    return (
        [f"Not compared: {what}." for applies, what, _ in table if applies],
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


def names_of(trainer: Any) -> list[str]:
    """The names of the reward functions. Two of one name have a number as well."""
    names = list(trainer.reward_func_names)
    return [name if names.count(name) == 1 else f"{name} {k}" for k, name in enumerate(names, 1)]


def schemas(trainer: Any) -> list[dict[str, Any]]:
    """The tools, as chat templates take them. Environments have others for each task."""
    from transformers.utils import get_json_schema

    if getattr(trainer, "environment_factories", None) is not None:
        return []
    return [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in trainer.tools or ()]


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
    from trl import GRPOTrainer

    kind = type(trainer)
    changed = {
        stage: [n for n in names if getattr(kind, n) is not getattr(GRPOTrainer, n)] for stage, names in METHODS.items()
    }
    found = {stage: place_of(getattr(kind, names[0])) for stage, names in changed.items() if names}
    return {**found, "grading": place_of(trainer.reward_funcs[0]) if len(trainer.reward_funcs) == 1 else ""}
