"""Options that `train` had once: what every run does now, and what to write instead. Imports nothing heavy.

They stand in command lines, in files of settings and in the config.toml of older runs. Written with the value that every
run has now, such an option is accepted. One that changes nothing of what is learned is accepted with any other value too,
and a line says that it has no effect. Any other value is refused with the sentence of its row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plumbob.console import UserError


@dataclass(frozen=True)
class Removed:
    """An option that is gone."""

    say: str
    """What every run does now, or what to write instead: the end of a sentence."""
    now: tuple[Any, ...] = ()
    """The values that mean what every run does now."""
    harmless: bool = False
    """Whether its value changes nothing of what is learned."""


REMOVED = {
    "eval_on_start": Removed(
        "held-out tasks are evaluated before the first step; --eval-examples 0: never", (True,), True
    ),
    "report": Removed("every run writes report.html at its end", (True,), harmless=True),
    "pass_threshold": Removed(
        "a rollout with a reward of 1 passes; `evaluate` has --pass-threshold, for other ones", (1.0,), harmless=True
    ),
    "vllm_folder": Removed(
        "adapters for vLLM servers on other machines are written to the run directory, so give an --output-dir that the "
        "machines share",
        harmless=True,
    ),
    "eval_accumulation_steps": Removed("evaluation keeps no tensors on the device", harmless=True),
    "log_on_each_node": Removed("only rank 0 logs", harmless=True),
    "n_env_jobs": Removed(
        "rollouts run asynchronously in the training process; --max-concurrent bounds their number", harmless=True
    ),
    "few_shot_prob": Removed("no environment of plumbob puts solved examples into its prompts", harmless=True),
    "logging_steps": Removed("each step has a row in the progress table", (1,), harmless=True),
    "per_device_eval_batch_size": Removed("--max-concurrent bounds the rollouts of evaluations too", harmless=True),
    "save_only_model": Removed(
        "checkpoints hold the optimizer's state, so that a run can be resumed", (False,), harmless=True
    ),
    "max_skipped_steps": Removed("a run ends after 3 optimizer steps in a row without a finite gradient", (3,), True),
    "ref_model_mixup_alpha": Removed("the reference policy stays the initial policy", (1.0,), harmless=True),
    "ref_model_sync_steps": Removed(
        "the reference policy stays the initial policy; to move it, start a new run from the trained model (--model)",
        (0,),
    ),
    "task_pools": Removed("--zero-signal refill samples further tasks for groups without a signal", (False,)),
    "max_refills": Removed("--zero-signal refill samples at most 3 further rounds in a step", (3,)),
    "overlong_penalty": Removed("--overlong penalise subtracts 1 from the reward", (1.0,)),
    "multi_objective_aggregation": Removed(
        "rewards are summed by their weights and then normalised; give weights with --reward-weights",
        ("sum_then_normalize",),
    ),
    "delta": Removed("--loss-type cispo bounds the ratio of every token"),
    "importance_cap": Removed(
        "weights of tokens are cut to 2 (token_truncate), and rows beyond 1.05 are left out (sequence_mask)",
        (1.05, 2.0),
    ),
    "stop_when_flat": Removed("a run takes all its steps, and --keep-best keeps the best checkpoint", harmless=True),
    "keep_control_tokens": Removed("a control token that a message spells stays text", (False,)),
    "explain_unread_calls": Removed(
        "the model is told the form of a call that could not be read, at most twice in a rollout", (True,)
    ),
}
"""Name, with underscores -> the option."""

SWITCHES = (
    *("log_on_each_node", "save_only_model", "task_pools", "keep_control_tokens", "explain_unread_calls"),
    *("eval_on_start", "report"),
)
"""Names in REMOVED whose options need no value."""


def is_switch(name: str) -> bool:
    """Whether `name`, with underscores, is an option that is gone and needed no value. Example: "no_task_pools"."""
    return name in SWITCHES or name.removeprefix("no_") in SWITCHES


def accept_removed(written: str, value: Any, shown: str) -> bool:
    """Whether `written` is an option that is gone; then it is accepted, with a line on stderr if it has no effect.

    `value`: from a file, or the text of the command line, or None without a value. `shown`: how messages name it.
    Raises UserError if its value is not what every run does now.
    """
    name = written.replace("-", "_")
    bare: Any = True
    if name not in REMOVED and name.removeprefix("no_") in SWITCHES:
        name, bare = name.removeprefix("no_"), False
    if name not in REMOVED:
        return False
    option = REMOVED[name]
    if _read(bare if value is None else value) in option.now:
        return True
    if not option.harmless:
        raise UserError(f"{shown} is gone, so leave it out: {option.say}")
    print(f"{shown} has no effect: {option.say}", file=sys.stderr)
    return True


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that are gone, whatever their values: for reading what an older run has done."""
    return {key: value for key, value in values.items() if key.replace("-", "_") not in REMOVED}


def _read(value: Any) -> Any:
    """A value of the command line as a file would have it."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        return value
