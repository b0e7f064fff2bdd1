"""Faults of real trainers, each injected into a healthy run: by a setting, or by a faulty double of one of its parts.

Each entry states the cause that the doctor must name.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from plumbob.testing.faults.doubles import (
    HeaderlessChat,
    Inject,
    ToollessChat,
    adapter_not_applied,
    adapter_unbound,
    bf16_masters,
    blind,
    chat_of,
    detached,
    earlier_turns_masked,
    generating,
    groups_shuffled,
    loss_of,
    merged_in_bf16,
    normalised_per_microbatch,
    one_name_skipped,
    one_row,
    optimizer_of_copies,
    retokenised,
    rewritten,
    rounded_weights_served,
    row_cut,
    scored,
    stale_cache,
    stale_engine,
    stops_at,
    tools_trained,
    without_headers,
    without_tools,
)
from plumbob.testing.faults.rewards import (
    held_out_differs,
    lottery,
    nearly_equal,
    not_a_number,
    overlapping,
    raises,
    rewarded,
    style,
)
from plumbob.trainer.algorithm.losses import policy_loss
from plumbob.trainer.training.run import Run


def nothing(stack: ExitStack, run: Run) -> None:
    """Inject nothing, for faults that consist of settings."""


HEALTHY: dict[str, dict[str, Any]] = {
    "lookup": {"model": "tiny"},
    "gsm8k": {"model": "tiny-gsm8k", "datasets": "synthetic", "max_tokens": 160},
    "musique": {"model": "tiny-musique", "datasets": "synthetic", "env_args": ("hops=2",), "max_tokens": 128},
}
"""Environment -> settings of a healthy run, which learns."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"loss_type": "grpo", "scale_rewards": "group"},
    {"loss_type": "gspo", "num_iterations": 4},
    {"loss_type": "cispo"},
    {"loss_type": "dapo", "zero_signal": "refill", "epsilon_high": 0.28},
    {"loss_type": "bnpo", "scale_rewards": "batch", "baseline": "leave_one_out"},
    {"num_iterations": 2, "num_minibatches": 2},
    {"kl_beta": 0.04},
    {"kl_beta": 0.04, "kl_placement": "reward"},
    {"kl_beta": 0.001, "peft": True},
    {"lora_dropout": 0.1, "peft": True},
    {"bf16": True},
    {"bf16": True, "peft": True, "gradient_checkpointing": True},
    {"temperature": 0.8, "warmup_steps": 10},
    {"max_grad_norm": 0.1, "weight_decay": 0.1, "overlong": "mask"},
    {"num_generations": 2, "eval_examples": 0, "max_prompt_length": 200},
    {"importance_correction": "sequence_mask"},
)
"""Other settings with which lookup is healthy."""
WITH_TOOLS = ("lookup", "musique")
"""Environments with tools."""


@dataclass(frozen=True)
class Fault:
    """One fault, and how it is injected."""

    name: str
    cause: str
    """The cause that the doctor must name."""
    inject: Inject = nothing
    """Injects the fault into a run that is set up; by default nothing, because the settings are the fault."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the faulty run, besides those of `HEALTHY`. All weights are trained unless they contain `peft`."""
    envs: tuple[str, ...] = tuple(HEALTHY)
    """Environments in which the fault can happen."""
    elsewhere: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Environment -> settings that replace `settings` there."""

    def settings_in(self, env: str) -> dict[str, Any]:
        """All settings of a run of the environment `env` with this fault."""
        return {**HEALTHY[env], **self.elsewhere.get(env, self.settings)}


FAULTS = (
    Fault("loss mask as attention mask", "loss-mask-as-attention-mask", scored(blind)),
    Fault(
        "missing assistant header in the row", "assistant-header-missing", rewritten(without_headers), envs=WITH_TOOLS
    ),
    Fault(
        "missing assistant header in the prompt", "assistant-header-missing", chat_of(HeaderlessChat), envs=WITH_TOOLS
    ),
    Fault("tools absent from the trained prompt", "tools-not-in-prompt", rewritten(without_tools), envs=WITH_TOOLS),
    Fault(
        "tools absent from both prompts",
        "tools-not-in-prompt",
        chat_of(ToollessChat),
        {"max_tokens": 32},
        envs=WITH_TOOLS,
    ),
    Fault("tool tokens trained", "context-tokens-trained", rewritten(tools_trained), envs=WITH_TOOLS),
    Fault("assistant tokens masked", "sampled-tokens-masked", rewritten(earlier_turns_masked), envs=WITH_TOOLS),
    Fault("re-tokenised turns", "retokenised-turns", rewritten(retokenised), envs=WITH_TOOLS),
    Fault("rows attend to each other", "rows-see-each-other", scored(one_row)),
    Fault(
        "tiny-std scaling",
        "tiny-std-scaling",
        rewarded(correct=nearly_equal),
        {"scale_rewards": "group", "env_args": ("max_hops=9",)},
        envs=("lookup",),  # in the other environments the rewards of a group differ too much
    ),
    Fault(
        "backwards KL",
        "kl-backwards",
        loss_of(lambda inputs, o: policy_loss(inputs, dataclasses.replace(o, kl_beta=-o.kl_beta))),
        {"kl_beta": 0.05},
    ),
    Fault("KL coefficient too large", "kl-too-large", settings={"kl_beta": 20.0}),
    Fault(
        "context limit too small",
        "truncated-context",
        settings={"max_context": 220},
        elsewhere={"gsm8k": {"max_context": 120}, "musique": {"max_context": 440}},
    ),
    Fault("engine drops the beginning", "truncated-context", generating(lambda ids, s: (ids[len(ids) // 2 :], s))),
    Fault("trainer drops the beginning", "truncated-context", rewritten(row_cut)),
    Fault("turn limit too small", "truncated-turns", settings={"max_tokens": 12}),
    Fault("too few turns", "truncated-rollouts", settings={"max_turns": 2}, envs=WITH_TOOLS),
    Fault(
        "stop token never drawn",
        "stop-token-wrong",
        stops_at("<|endoftext|>"),
        {"max_tokens": 32},
        elsewhere={"musique": {}},
    ),
    Fault("stop token too early", "stop-token-wrong", stops_at("</tool_call>"), {"max_tokens": 32}, envs=WITH_TOOLS),
    Fault("adapter never applied in the engine", "adapter-not-applied", adapter_not_applied, {"peft": True}),
    Fault("adapter bound to no module", "adapter-bound-to-no-module", adapter_unbound, {"peft": True}),
    Fault("full weights never arrive", "weights-not-synced", adapter_unbound),
    Fault("one layer's weights never arrive", "weights-not-synced", one_name_skipped),
    Fault("adapter merged in bf16", "merged-in-bf16", merged_in_bf16, {"peft": True, "learning_rate": 1e-4}),
    Fault("full weights sent in bf16", "merged-in-bf16", rounded_weights_served, {"learning_rate": 1e-5}),
    Fault("stale engine", "engine-stale", stale_engine),
    Fault("stale cache", "engine-stale", stale_cache),
    Fault("weights in bf16, small learning rate", "weights-in-bf16", bf16_masters, {"learning_rate": 1e-6}),
    Fault("learning rate far too low", "learning-rate-too-low", settings={"learning_rate": 1e-7}),
    Fault("LoRA learning rate far too low", "learning-rate-too-low", settings={"learning_rate": 1e-6, "peft": True}),
    Fault("learning rate far too high", "learning-rate-too-high", settings={"learning_rate": 0.03}),
    Fault("gradient clipped to nothing", "gradient-clipped-to-nothing", settings={"max_grad_norm": 1e-6}),
    Fault("half of the adapter dropped", "dropout-in-training", settings={"peft": True, "lora_dropout": 0.5}),
    Fault("optimizer of other tensors", "optimizer-moves-nothing", optimizer_of_copies),
    Fault("detached loss", "no-gradient", scored(detached)),
    Fault(
        "sign of the advantage",
        "gradient-backwards",
        loss_of(lambda inputs, o: policy_loss(dataclasses.replace(inputs, advantages=-inputs.advantages), o)),
    ),
    Fault(
        "temperature not applied in the engine",
        "temperature-not-applied",
        generating(lambda ids, s: (ids, dataclasses.replace(s, temperature=1.0))),
        {"temperature": 0.7},
    ),
    Fault(
        "temperature not applied in the trainer",
        "temperature-not-applied",
        scored(lambda original, rows, temperature: original(rows, 1.0)),
        {"temperature": 1.3},
    ),
    Fault("top-p unaccounted", "sampling-truncated", settings={"top_p": 0.5}),
    Fault(
        "top-p by the engine's own default",
        "sampling-truncated",
        generating(lambda ids, s: (ids, dataclasses.replace(s, top_p=0.8))),
    ),
    Fault("groups shuffled", "groups-mixed", groups_shuffled),
    Fault("reward constant", "reward-constant", rewarded(correct=lambda task, trace, correct: 0.5)),
    Fault(
        "reward dominated by format", "reward-format-dominated", rewarded(0.05, correct=lambda t, r, c: c, style=style)
    ),
    Fault("reward nondeterministic", "reward-nondeterministic", rewarded(correct=lottery)),
    Fault("reward not a number", "reward-not-finite", rewarded(correct=not_a_number)),
    Fault("right answers not rewarded", "oracle-fails", rewarded(correct=lambda t, r, c: 0.1 * len(r.nodes) * (1 - c))),
    Fault("the judge is down", "environment-fails", rewarded(correct=raises)),
    Fault("evaluation and training parse differently", "evaluation-parses-differently", held_out_differs),
    Fault("held-out tasks trained on", "held-out-in-training", overlapping),
    Fault(
        "task out of reach",
        "never-succeeds",
        settings={"env_args": ("difficulty=hard",)},
        elsewhere={"gsm8k": {"model": "tiny-musique"}, "musique": {"model": "tiny-gsm8k"}},
    ),
    Fault("task already solved", "task-solved", settings={"env_args": ("difficulty=trivial",)}, envs=("lookup",)),
    Fault(
        "normaliser wrong by the accumulation factor", "normaliser-depends-on-microbatches", normalised_per_microbatch
    ),
)
