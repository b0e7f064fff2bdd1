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
from plumbob.trainer.config.text_table import table_rows

TABLE = """
  eval_on_start | true any | held-out tasks are evaluated before the first step; --eval-examples 0: never
  report | true any | every run writes report.html at its end
  pass_threshold | 1 any | a rollout with a reward of 1 passes; `evaluate` has --pass-threshold, for other ones
  vllm_folder | any | adapters for vLLM servers on other machines are written to the run directory, so give an
      --output-dir that the machines share
  eval_accumulation_steps | any | evaluation keeps no tensors on the device
  log_on_each_node | any | only rank 0 logs
  n_env_jobs | any | rollouts run asynchronously in the training process; --max-concurrent bounds their number
  few_shot_prob | any | no environment of plumbob puts solved examples into its prompts
  logging_steps | 1 any | each step has a row in the progress table
  per_device_eval_batch_size | any | --max-concurrent bounds the rollouts of evaluations too
  save_only_model | false any | checkpoints hold the optimizer's state, so that a run can be resumed
  max_skipped_steps | 3 any | a run ends after 3 optimizer steps in a row without a finite gradient
  ref_model_mixup_alpha | 1 any | the reference policy stays the initial policy
  ref_model_sync_steps | 0 | the reference policy stays the initial policy; to move it, start a new run from the trained
      model (--model)
  task_pools | false | --zero-signal refill samples further tasks for groups without a signal
  max_refills | 3 | --zero-signal refill samples at most 3 further rounds in a step
  overlong_penalty | 1 | --overlong penalise subtracts 1 from the reward
  multi_objective_aggregation | sum_then_normalize | rewards are summed by their weights and then normalised; give
      weights with --reward-weights
  delta | - | --loss-type cispo bounds the ratio of every token
  importance_cap | 1.05 2 | weights of tokens are cut to 2 (token_truncate), and rows beyond 1.05 are left out
      (sequence_mask)
  stop_when_flat | any | a run takes all its steps, and --keep-best keeps the best checkpoint
  keep_control_tokens | false | a control token that a message spells stays text
  explain_unread_calls | true | the model is told the form of a call that could not be read, at most twice in a rollout
"""
"""Of each option the name with underscores; the values that mean what every run does now, and `any` if its value changes
nothing of what is learned; and what every run does now, or what to write instead, as the end of a sentence."""


@dataclass(frozen=True)
class Removed:
    """An option that is gone."""

    name: str
    values: str
    say: str


REMOVED = {row[0]: Removed(*row) for row in table_rows(TABLE)}

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
    option, accepted = REMOVED[name], REMOVED[name].values.split()
    if _same_text(bare if value is None else value) in accepted:
        return True
    if "any" not in accepted:
        raise UserError(f"{shown} is gone, so leave it out: {option.say}")
    print(f"{shown} has no effect: {option.say}", file=sys.stderr)
    return True


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that are gone, whatever their values: for reading what an older run has done."""
    return {key: value for key, value in values.items() if key.replace("-", "_") not in REMOVED}


def _same_text(value: Any) -> str:
    """A value of a file or of the command line as TABLE writes it. Example: `_same_text("1.0") == _same_text(1) == "1"`."""
    try:
        return str(value).lower() if isinstance(value, bool) else f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value).lower()
